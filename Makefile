# Baton's commands for people who work on it. `make setup` is what the others call first; it does nothing when nothing has changed.
#
#   PYTHON=python3.12          the interpreter that .venv is made with (3.11 to 3.13)
#   TORCH_INDEX_URL=URL        one more index to look for torch in, such as PyTorch's CPU index: on Linux the default wheels bring CUDA
#   RUN_ONCE=1                 `make run` ends after the first answer
#   PROMPT="What does …?"      what `make run` asks first
#   ARGS="--decode 2"          more flags for `baton up` (run) or pytest (test, test-long)

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.baton-setup
PYTHON ?= python3
export PROMPT ?= What does os.path.join do?

.PHONY: setup run test test-long test-triton check check-deploy proto bench clean
.DEFAULT_GOAL := setup

setup: $(STAMP)
	@:

# torch comes first and alone, so that a build from TORCH_INDEX_URL, or one that this machine already offers, is taken and then kept.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Baton needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is not: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setup      into $(VENV), once"
	@set -e; SECONDS=0; \
	  test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet -c constraints.txt $(if $(TORCH_INDEX_URL),--extra-index-url '$(TORCH_INDEX_URL)') torch; \
	  PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[embedded,test]'; \
	  touch $(STAMP); \
	  echo "setup      $$(du -sh $(VENV) | cut -f1) in $$((SECONDS / 60)) min $$((SECONDS % 60)) s"

run: setup
	@exec $(BIN)/baton up --first-prompt "$$PROMPT" $(if $(filter-out 0,$(RUN_ONCE)),--once) $(ARGS)

test: setup check
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# Some tests alone, as ARGS may ask for, are without the interpreted ones: pytest ends with an error where it is left with none.
test-long: setup check
	BATON_TEST_LONG=1 $(BIN)/python -m pytest -m '' $(ARGS)
	$(if $(ARGS),,$(MAKE) test-triton)

# The kernel for GPUs, interpreted on a CPU: slow, and apart from .venv, because CPU builds of torch come without triton.
test-triton: setup
	@test -d build/triton || $(BIN)/python -m pip install --quiet --no-deps --target build/triton triton==3.7.1
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest tests/gpu/test_triton_attention.py $(ARGS)

check: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The chart's tests, which `make test` runs, too.
check-deploy: setup
	$(BIN)/python tools/gen_chart.py --check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy $(ARGS)

proto: setup
	$(BIN)/python tools/gen_proto.py

# One benchmark by NAME; without a name it lists them.
bench: setup
	@$(BIN)/python -m bench $(NAME) $(ARGS)

clean:
	rm -rf $(VENV) build dist services/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
