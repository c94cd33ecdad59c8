# Commands for people who work on Baton. Each sets up .venv first; that does nothing when nothing has changed.
#
#   PYTHON=python3.12          interpreter for .venv (3.11 to 3.13)
#   TORCH_INDEX_URL=URL        additional index for torch, such as PyTorch's CPU index; the default wheels bring CUDA
#   RUN_ONCE=1                 `make run` ends after the first answer
#   PROMPT="What does ...?"    first question of `make run`
#   ARGS="--decode 2"          more flags for `baton up` (run), pytest (test*), or a benchmark (bench)
#   NAME=scheduler             the benchmark of `make bench`
#   SHARD=1/3                  the part of `make test-long` to run
#   MINUTES=30 SEED=7          duration and seed of `make nemesis`; NETWORK=namespaces needs root
#   MINUTES=10                 time of `make test-fuzz`

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.baton-setup
CLIENTS := .venv-clients
CLIENTS_LOCK := tests/integration/clients/requirements.lock
CLIENTS_STAMP := $(CLIENTS)/.baton-setup
VERSION_FILE := services/baton/version.txt
PYTHON ?= python3
export PROMPT ?= What does os.path.join do?
# Python keeps compiled modules, whatever the caller's environment says: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

UNIT_TESTS := tests/unit tests/contract tests/sim $(addprefix --ignore tests/unit/,model bench test_demo_model.py)
UNIT_MARKS := not long and not slow and not model and not integration

.PHONY: setup clients run test test-unit test-long test-triton test-asan test-fuzz nemesis check check-types \
  check-imports check-rules check-reference check-style check-deploy proto reference docs bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP) $(VERSION_FILE)
	@:

# The version contains the commit, and a fleet refuses nodes with another version.
$(VERSION_FILE): $(wildcard .git/logs/HEAD) | $(STAMP)
	@$(BIN)/python -m setuptools_scm --force-write-version-files > /dev/null; touch $@

# torch comes first and alone, so that a build from TORCH_INDEX_URL, or one that this machine already offers, is kept.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Baton needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is not: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setup      into $(VENV), once"
	@set -e; SECONDS=0; \
	  $(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV); \
	  $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url '$(TORCH_INDEX_URL)') torch; \
	  PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[embedded,test]'; \
	  touch $(STAMP); \
	  echo "setup      $$(du -sh $(VENV) | cut -f1) in $$((SECONDS / 60)) min $$((SECONDS % 60)) s"

# The clients that tests run unmodified, in an environment of their own.
clients: $(CLIENTS_STAMP)
	@:

$(CLIENTS_STAMP): $(CLIENTS_LOCK) | $(STAMP)
	@echo "setup      the clients under test into $(CLIENTS), once"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement $(CLIENTS_LOCK)
	@touch $@

run: setup
	@exec $(BIN)/baton up --first-prompt "$$PROMPT" $(if $(filter-out 0,$(RUN_ONCE)),--once) $(ARGS)

# Everything that a change must pass. Three processes for two cores, because tests with clusters often wait. tests/shards.py
# orders the files, so that few of those run at once; xdist would run files with few but long tests last.
test: setup clients check
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# Seconds per package: no Ray, Redis, NIXL or model. Three processes for two cores, because some tests wait.
test-unit: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "$(UNIT_MARKS)" $(UNIT_TESTS) $(ARGS)

# The full-size forms. Single tests, as ARGS may select, and shards but the first run without the interpreted,
# sanitized and fuzzed ones. SHARD=i/n runs one of n parts of the files.
test-long: setup clients check
	BATON_TEST_LONG=1 BATON_TEST_SHARD=$(SHARD) $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m '' $(ARGS)
	$(if $(ARGS)$(filter-out 1/%,$(SHARD)),,$(MAKE) -j 2 test-triton test-asan && $(MAKE) test-fuzz)

# Random faults on real processes, with a check of every request. It prints the seed and the command that repeats it.
MINUTES ?= 30
NETWORK ?= loopback
nemesis: setup
	$(BIN)/python -m tests.nemesis --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --network $(NETWORK) $(ARGS)

# The GPU kernel, interpreted on a CPU: slow, and outside .venv, because CPU builds of torch come without triton.
test-triton: setup
	@test -d build/triton || $(BIN)/python -m pip install --quiet --no-deps --target build/triton triton==3.7.1
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest $(addprefix tests/gpu/test_,triton_attention.py large_pool_on_gpu.py) $(ARGS)

# The C++ kernels with sanitizers: an access outside of a tensor ends the process with a report.
ASAN_TESTS := $(addprefix tests/unit/model/test_,native_attention.py decoder_backends.py torch_executor.py best_tokens.py)
ASAN_TESTS += $(addprefix tests/unit/model/linear/test_,packed_linear.py coded_experts.py)
SANITIZERS = $(foreach name,libasan libubsan,$(shell c++ -print-file-name=$(name).so))
test-asan: export XDG_CACHE_HOME := $(CURDIR)/build/asan
test-asan: setup
	$(BIN)/python -m tests.asan_kernels
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -s -k 'not x86-64 and not skylake and not icelake' $(ASAN_TESTS) $(ARGS)

# Coverage-guided fuzzing of what clients send, for MINUTES of processor time in all. Atheris lives outside .venv, as few
# platforms have it.
test-fuzz: MINUTES := 10
test-fuzz: setup
	@set -e; if test "$$(uname -sm)" != "Linux x86_64"; then \
	    echo "test-fuzz  skipped: atheris 3.0.0 has no wheel for $$(uname -sm)"; exit 0; fi; \
	  test -f build/atheris/.complete || { rm -rf build/atheris; \
	    $(BIN)/python -m pip install --quiet --no-deps --target build/atheris atheris==3.0.0; \
	    touch build/atheris/.complete; }; \
	  PYTHONPATH=build/atheris $(BIN)/python -m tests.fuzz $(MINUTES)

# Two at a time, the longest first.
check: setup
	@$(MAKE) --no-print-directory -j 2 check-types docs check-imports check-rules check-reference check-style

check-types: setup
	$(BIN)/mypy

check-imports: setup
	$(BIN)/lint-imports --no-logo

check-rules: setup
	$(BIN)/python -m tools.checks

check-reference: setup
	$(BIN)/python -m tools.reference --check

check-style: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

# The chart's tests, which `make test` runs too.
check-deploy: setup
	$(BIN)/python tools/gen_chart.py --check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy $(ARGS)

proto: setup
	$(BIN)/python tools/gen_proto.py

# Writes docs/reference/ from the code.
reference: setup
	$(BIN)/python -m tools.reference

# The documentation site, into build/site. A broken link fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# One benchmark by NAME; without a name it lists them.
bench: setup
	@$(BIN)/python -m bench $(NAME) $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) build dist services/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
