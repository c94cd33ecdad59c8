"""Simulates the machines of a Ray cluster with Linux namespaces. Needs root.

Each machine has its own network, process ids, host name and shared memory.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from baton.runtime.process.process import with_parent_death_signal
from tests.netns import Netns, Network, own_environ, pid_below, tool

T = TypeVar("T")

GCS_PORT = 6379
START_S = 60.0
_BECOME = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity'


class Host:
    """One simulated machine. All processes on it end with it."""

    def __init__(self, name: str, netns: Netns, directory: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.address = netns.address
        self.directory = directory
        self._netns = netns
        self._environ = environ
        namespaces = "--uts --ipc --pid --mount --mount-proc --fork --kill-child".split()
        self._unshare = subprocess.Popen(
            with_parent_death_signal(
                [tool("ip"), "netns", "exec", netns.name, "unshare", *namespaces, "sh", "-c", _BECOME, name]
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "up\n"
        (init,) = psutil.Process(self._unshare.pid).children()
        self._init_pid = init.pid

    def popen(self, *argv: str, log: Path, **environ: str) -> subprocess.Popen[bytes]:
        """Start a command on this machine. Its output is appended to `log`."""
        enter = [tool("nsenter"), "--target", str(self._init_pid), "--net", "--uts", "--ipc", "--pid", "--mount", "--"]
        with log.open("ab") as output:
            return subprocess.Popen(
                with_parent_death_signal([*enter, *argv]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**own_environ(), **self._environ, **environ},
                start_new_session=True,
            )

    def ray(self, *flags: str, **environ: str) -> subprocess.Popen[bytes]:
        """Run `ray start` with these flags, which makes the machine a Ray node."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", self.address]
        fixed = ["--object-store-memory", str(80 * 2**20), "--temp-dir", str(self.directory / "ray")]
        return self.popen(*ray, *fixed, *flags, log=self.directory / "ray.out", **environ)

    def until_node(self) -> None:
        """Wait until Ray runs on this machine. Raises AssertionError with the output of Ray."""
        out, end_s = self.directory / "ray.out", time.monotonic() + START_S
        while "Ray runtime started" not in out.read_text():
            assert time.monotonic() < end_s, out.read_text()
            time.sleep(0.1)

    def kill_raylet(self) -> None:
        """Kill Ray's node process on this machine with SIGKILL, as `ray start` runs it."""
        ours = os.readlink(f"/proc/{self._init_pid}/ns/pid")
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "raylet" and os.readlink(f"/proc/{process.pid}/ns/pid") == ours:
                process.kill()
                return
        raise AssertionError(f"no raylet runs on {self.name}")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread of this process that uses the network of this machine."""
        return self._netns.call(function)

    def close(self) -> None:
        """Kill all processes of this machine."""
        self._unshare.kill()
        self._unshare.wait()
        assert self._unshare.stdout is not None
        self._unshare.stdout.close()


class Hosts:
    """Machines on one network. `head` runs the Ray head without CPUs, for services and drivers."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        number = os.getpid() % 60_000
        self._network = Network(f"10.{200 + number // 256 % 50}.{number % 256}", stack)
        token = directory / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        self.hosts: list[Host] = []
        self.head = self.add("head")
        self.ray_address = f"{self.head.address}:{GCS_PORT}"
        self.head.ray("--head", "--port", str(GCS_PORT), "--num-cpus", "0", "--include-dashboard", "false")

    def add(self, name: str) -> Host:
        """Add a machine. The others reach it at its `address`."""
        netns = self._network.add()
        directory = self.directory / name
        directory.mkdir()
        host = Host(name, netns, directory, self.environ)
        self._stack.callback(host.close)
        self.hosts.append(host)
        return host

    def join(self, host: Host, *flags: str, **environ: str) -> subprocess.Popen[bytes]:
        """Make a machine a worker node of the cluster."""
        return host.ray("--address", self.ray_address, *flags, **environ)


@contextmanager
def ray_hosts() -> Iterator[Hosts]:
    """Start a cluster with only its head machine. Tests add others."""
    directory = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp"))  # a short path, for Ray's sockets
    try:
        with ExitStack() as stack:
            yield Hosts(directory, stack)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def terminate(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Send SIGTERM to the command itself and not to its `nsenter` wrapper. Return the exit code."""
    os.kill(pid_below(process), signal.SIGTERM)
    return process.wait(limit_s)
