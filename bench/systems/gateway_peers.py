"""Gateways that `gateway` compares with Baton's, each with its own virtual environment and stub."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.model.loading.model_source import resolve_model
from bench.systems.gateway_process import Cores, System, free_port, logged, started


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A gateway to compare with.

    packages: arguments of each `pip install` call.
    run: `run(home, python, cores, step_s, stamps)` starts the gateway and its stub.
    """

    name: str
    package: str
    packages: tuple[tuple[str, ...], ...]
    run: Callable[[Path, Path, Cores, float, Path], AbstractContextManager[System]]


@contextmanager
def sglang_router(home: Path, python: Path, cores: Cores, step_s: float, stamps: Path) -> Iterator[System]:
    """Run sglang-router, which forwards requests over HTTP unchanged and does not tokenize."""
    with started([sys.executable, "-m", "bench.systems.gateway_stub_http", str(step_s), str(stamps)], cores.others) as (
        stub_pid,
        worker,
    ):
        port = free_port()
        flags = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(free_port()),
            "--log-level",
            "error",
        ]
        command = [str(python), "-m", "sglang_router.launch_router", *flags, "--worker-urls", f"http://{worker}"]
        with logged(command, cores.gateway, home / "sglang-router.log") as pid:
            yield System(
                name="sglang-router",
                url=f"http://127.0.0.1:{port}",
                model="demo",
                pid=pid,
                stub_pid=stub_pid,
                stamps=stamps,
            )


@contextmanager
def dynamo(home: Path, python: Path, cores: Cores, step_s: float, stamps: Path) -> Iterator[System]:
    """Run Dynamo's frontend, which tokenizes and detokenizes.

    It discovers its worker through files and talks to it over TCP, so neither etcd nor NATS is needed.
    """
    env = {"DYN_FILE_KV": str(stamps.with_suffix(".kv")), "DYN_LOG": "error", "HOME": str(home)}
    stub = [
        str(python),
        "-m",
        "bench.systems.gateway_stub_dynamo",
        str(step_s),
        str(stamps),
        str(resolve_model("demo")),
    ]
    with logged(stub, cores.others, home / "dynamo-stub.log", **env) as stub_pid:
        port = free_port()
        flags = [
            "--http-host",
            "127.0.0.1",
            "--http-port",
            str(port),
            "--discovery-backend",
            "file",
            "--request-plane",
            "tcp",
        ]
        with logged([str(python), "-m", "dynamo.frontend", *flags], cores.gateway, home / "dynamo.log", **env) as pid:
            yield System(
                name="dynamo", url=f"http://127.0.0.1:{port}", model="demo", pid=pid, stub_pid=stub_pid, stamps=stamps
            )


PEERS = (
    Peer(name="sglang-router", package="sglang-router", packages=(("sglang-router",),), run=sglang_router),
    Peer(
        name="dynamo",
        package="ai-dynamo",
        # Leaves out what the frontend never loads (transformers, kubernetes, an SDK missing on some indexes).
        packages=(("ai-dynamo-runtime", "msgspec", "packaging", "pyyaml", "uvloop"), ("--no-deps", "ai-dynamo")),
        run=dynamo,
    ),
)


def install(peer: Peer, home: Path) -> Path | None:
    """Install the peer if it is missing. Return its Python, or None (with a note on stderr) if pip fails."""
    directory = home / peer.name
    python = directory / "bin" / "python"
    if not python.exists():
        _call([sys.executable, "-m", "venv", str(directory)])
    if version(peer, python) is None:
        for packages in peer.packages:
            if (problem := _call([str(python), "-m", "pip", "install", "--quiet", *packages])) is not None:
                print(f"{peer.name} cannot be installed: {problem}", file=sys.stderr)
                return None
    return python


def version(peer: Peer, python: Path) -> str | None:
    """Return the installed version, or None."""
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _call(command: Sequence[str]) -> str | None:
    """Run a command. Return None if it succeeds, otherwise the last line of its stderr."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]
