"""Import rules beyond the ranks that `lint-imports` checks: which module may use which library, clock or
generator."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("baton.v1", "baton.wire.v1")
SERVICES = ("baton.gateway", "baton.scheduler", "baton.worker")

HOMES: dict[str, tuple[str, ...]] = {
    "grpc": ("baton.rpc", *GENERATED, "loadgen"),
    "grpc_health": ("baton.rpc",),
    "grpc_reflection": ("baton.rpc",),
    "redis": ("baton.store",),
    "nixl": ("baton.transfer.backends.nixl",),
    "ray": ("baton.fleet",),
    "fastokens": ("baton.gateway.text.text_encoder",),
    "llguidance": ("baton.engine.constraints", "baton.gateway.grammar_checks"),
    # kv_path_pair is a program of its own
    "torch": ("baton.model", "baton.transfer.backends.collective", "baton.worker.device.kv_memory.kv_path_pair"),
    "transformers": ("baton.model",),
    "click": ("baton.cli", "loadgen"),
    "xxhash": (
        "baton.model.loading.weight_digests",
        "baton.worker.disk.disk_format",
        "baton.worker.prefix_files.prefix_format",
    ),
    "yaml": ("baton.runtime",),
    "opentelemetry": ("baton.runtime.observability.otlp",),
}
"""The only modules that may import a library. A `*` stands for any letters."""

SIMULATED_PACKAGES = ("core", "prefix_index", "engine", "scheduler", "gateway", "worker", "sim", "transfer")
"""Packages whose code also runs in the simulator. They take the time from the running event loop and get a
seeded generator."""
NOT_SIMULATED = (
    "baton.model",
    "baton.transfer.*_backend",
    "baton.transfer.backends.collective.*_group",
    "baton.transfer.backends.collective.rendezvous_store",
    "baton.transfer.backends.nixl.nixl_thread",
    "baton.transfer.backends.prefault",
    "baton.gateway.gateway_main",
    "baton.scheduler.scheduler_main",
    "baton.worker.disk.nixl_payloads",
    "baton.worker.worker_main",
)
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"}
UNPICKLERS = ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle")
"""Libraries that can run code while they read data."""
CODE_GENERATORS = {"baton.rpc.mappers.message_mapping"}
"""Modules that may call `eval`: they generate functions from the field names of their own classes, as
`dataclasses` does, and never from data."""
LOADGEN_MODULES_FOR_SIM = {
    "loadgen.plan.plan",
    "loadgen.plan.sources.trace",
    "loadgen.plan.arrivals",
    "loadgen.measure.records",
    "loadgen.measure.request_metrics",
}


@dataclass(frozen=True, slots=True)
class Import:
    """`module` imports `target`, which may be a module or a name in one."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def sources(root: Path = ROOT) -> dict[str, ast.Module]:
    """The modules of both packages, generated code left out. Read once for all tests, which change nothing in
    them."""
    files = {
        ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): file
        for base, package in ((root / "services", "baton"), (root, "loadgen"))
        for file in sorted((base / package).rglob("*.py"))
    }
    return {module: ast.parse(file.read_bytes()) for module, file in files.items() if not is_in(module, GENERATED)}


def imports(modules: dict[str, ast.Module]) -> Iterator[Import]:
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (Import(module, alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}:{node.lineno} imports relatively"
                yield from (Import(module, f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def own_imports() -> list[Import]:
    """The imports of both packages, found once for all tests."""
    return list(imports(sources()))


def is_in(module: str, packages: tuple[str, ...] | set[str]) -> bool:
    """Whether `module` is one of `packages` or inside one."""
    for package in packages:
        head, star, tail = package.partition("*")
        if star and module.startswith(head) and tail in module[len(head) :]:
            return True
        if module == package or module.startswith(package + "."):
            return True
    return False


def misplaced_libraries(found: list[Import]) -> list[str]:
    return [str(i) for i in found if (homes := HOMES.get(i.target.split(".")[0])) and not is_in(i.module, homes)]


def services_that_import_rpc_or_store(found: list[Import]) -> list[str]:
    mains = {f"{service}.{service.removeprefix('baton.')}_main" for service in SERVICES}
    return [
        str(i)
        for i in found
        if is_in(i.module, SERVICES) and i.module not in mains and is_in(i.target, ("baton.rpc", "baton.store"))
    ]


BATON_MODULES_FOR_LOADGEN = ("baton.v1", "baton.runtime.process.run_file")
"""The public messages, and how a user's own clusters are found."""


def imports_between_loadgen_and_baton(found: list[Import]) -> list[str]:
    inward = [
        i
        for i in found
        if is_in(i.module, ("loadgen",))
        and is_in(i.target, ("baton",))
        and not is_in(i.target, BATON_MODULES_FOR_LOADGEN)
    ]
    outward = [
        i
        for i in found
        if is_in(i.target, ("loadgen",))
        and not is_in(i.module, ("loadgen",))
        and not (is_in(i.module, ("baton.sim",)) and is_in(i.target, LOADGEN_MODULES_FOR_SIM))
    ]
    return [str(i) for i in inward + outward]


def clocks_and_random_numbers(modules: dict[str, ast.Module]) -> list[str]:
    """Uses of the process's own clock, or of its shared random numbers, in code that the simulator runs."""
    found = []
    packages = tuple(f"baton.{name}" for name in SIMULATED_PACKAGES)
    for module, tree in modules.items():
        if not is_in(module, packages) or is_in(module, NOT_SIMULATED):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                is_dice = node.value.id == "random" and node.attr[0].islower()
                if (node.value.id == "time" and node.attr in CLOCKS) or is_dice or name in ("os.urandom", "uuid.uuid4"):
                    found.append(f"{module}:{node.lineno} uses {name}")
            elif isinstance(node, ast.ImportFrom) and node.module in ("time", "random"):
                names = [
                    alias.name
                    for alias in node.names
                    if alias.name in CLOCKS or (node.module == "random" and alias.name.islower())
                ]
                found += [f"{module}:{node.lineno} uses {node.module}.{name}" for name in names]
    return found


SAFETY_OPTIONS = ("weights_only", "allow_pickle", "trust_remote_code")
UNSAFE_CALLS = ("eval", "exec", "__import__", "get_serialized_descs", "deserialize_descs", "find_class", "load")


def last_name(function: ast.expr) -> str:
    """Return the last name of a called expression, "" if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def unsafe_loading(modules: dict[str, ast.Module]) -> list[str]:
    """Return calls and imports by which data could be executed: pickle and its kind, `eval`, `exec`, unsafe
    loaders."""
    found = [str(i) for i in imports(modules) if i.target.split(".")[0] in UNPICKLERS]
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            options = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg in SAFETY_OPTIONS}
            called = ast.unparse(node.func) if options or last_name(node.func) in UNSAFE_CALLS else ""
            is_unsafe = (
                (called in ("eval", "exec", "__import__") and module not in CODE_GENERATORS)
                or called.endswith((".get_serialized_descs", ".deserialize_descs", ".find_class"))
                or (called == "torch.load" and options.get("weights_only") != "True")
                or options.get("allow_pickle", "False") != "False"
                or options.get("trust_remote_code", "False") != "False"
            )
            if is_unsafe:
                found.append(f"{module}:{node.lineno} calls {called}")
    return found


@pytest.mark.slow
def test_no_data_is_executed() -> None:
    assert unsafe_loading(sources()) == []


def test_libraries_are_imported_only_where_allowed() -> None:
    assert misplaced_libraries(own_imports()) == []


def test_only_the_main_module_of_a_service_imports_rpc_and_store() -> None:
    assert services_that_import_rpc_or_store(own_imports()) == []


def test_loadgen_and_baton_share_only_the_public_messages_and_the_run_file() -> None:
    assert imports_between_loadgen_and_baton(own_imports()) == []


@pytest.mark.fault("F-33")
def test_simulated_code_uses_no_system_clock_or_global_random_numbers() -> None:
    assert clocks_and_random_numbers(sources()) == []


def test_core_imports_only_the_standard_library() -> None:
    found = [i for i in own_imports() if is_in(i.module, ("baton.core",))]
    allowed = sys.stdlib_module_names | {"baton"}
    assert [str(i) for i in found if i.target.split(".")[0] not in allowed] == []


def test_every_code_directory_is_a_package() -> None:
    """A directory without `__init__.py` works from a checkout and is missing from the wheel."""
    directories = {file.parent for package in ("services/baton", "loadgen") for file in (ROOT / package).rglob("*.py")}
    assert [
        str(directory.relative_to(ROOT)) for directory in directories if not (directory / "__init__.py").exists()
    ] == []


def loaded_after_importing(package: str, forbidden: set[str]) -> list[str]:
    """Return the `forbidden` modules that are loaded after all modules of `package` were imported in a new
    process."""
    modules = [module for module in sources() if is_in(module, (package,))]
    code = (
        "import importlib, json, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(json.dumps(sorted({forbidden!r} & sys.modules.keys())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("baton.gateway", {"torch", "transformers"}),
        ("baton.sim", {"grpc", "redis", "ray", "nixl", "torch"}),
    ],
)
def test_importing_a_package_loads_no_heavy_library(package: str, forbidden: set[str]) -> None:
    assert loaded_after_importing(package, forbidden) == []


# The checks themselves, on sources that break each rule.

BROKEN = {
    "services/baton/worker/reporting/worker_reporter.py": "import grpc\nfrom baton.rpc import worker_rpc\n",
    "services/baton/worker/worker_main.py": (
        "from baton.rpc import worker_rpc\nfrom baton.store.redis.redis_keys import key\n"
    ),
    "services/baton/rpc/worker_rpc.py": "import grpc.aio\n",
    "services/baton/wire/v1/x_pb2_grpc.py": "import grpc\n",
    "services/baton/transfer/backends/collective/nccl_group.py": "import torch, time\ntime.sleep(1)\n",
    "services/baton/transfer/owner/lease_deadlines.py": (
        "import torch, time, random\ntime.monotonic()\ntime.time()\nrandom.random()\nrandom.Random(3)\n"
    ),
    "services/baton/engine/loop.py": "from time import sleep, time\nfrom random import Random, random\n",
    "services/baton/sim/scenario.py": "from loadgen.plan import plan\nfrom loadgen.send.client import Client\n",
    "services/baton/rpc/peer_rpc.py": "from pickle import loads\nagent.get_serialized_descs(x)\neval('1')\n",
    "services/baton/model/loading/model_source.py": (
        "import torch\ntorch.load(f)\ntorch.load(f, weights_only=True)\nmodel.eval()\nnp.load(f, allow_pickle=True)\n"
        "Model.from_pretrained(d, trust_remote_code=True)\nModel.from_pretrained(d, trust_remote_code=False)\n"
    ),
    "loadgen/send/client.py": "from baton.v1 import inference_pb2\nfrom baton.core import ids\n",
}


def test_each_rule_finds_violations(tmp_path: Path) -> None:
    for name, text in BROKEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    modules = sources(tmp_path)
    found = list(imports(modules))
    assert misplaced_libraries(found) == [
        "baton.transfer.owner.lease_deadlines:1 imports torch",
        "baton.worker.reporting.worker_reporter:1 imports grpc",
    ]
    assert services_that_import_rpc_or_store(found) == [
        "baton.worker.reporting.worker_reporter:2 imports baton.rpc.worker_rpc"
    ]
    assert imports_between_loadgen_and_baton(found) == [
        "loadgen.send.client:2 imports baton.core.ids",
        "baton.sim.scenario:2 imports loadgen.send.client.Client",
    ]
    assert unsafe_loading(modules) == [
        "baton.rpc.peer_rpc:1 imports pickle.loads",
        "baton.model.loading.model_source:2 calls torch.load",
        "baton.model.loading.model_source:5 calls np.load",
        "baton.model.loading.model_source:6 calls Model.from_pretrained",
        "baton.rpc.peer_rpc:2 calls agent.get_serialized_descs",
        "baton.rpc.peer_rpc:3 calls eval",
    ]
    assert clocks_and_random_numbers(modules) == [
        "baton.engine.loop:1 uses time.sleep",
        "baton.engine.loop:2 uses random.random",
        "baton.transfer.owner.lease_deadlines:2 uses time.monotonic",
        "baton.transfer.owner.lease_deadlines:4 uses random.random",
    ]
