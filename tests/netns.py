"""Simulates the networks of several machines with Linux network namespaces on a bridge. Needs root."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")

TOOLS = ("ip", "unshare", "nsenter")
_CLONE_NEWNET = 0x40000000
_UNUSED_MAC = "02:00:00:00:00:01"


def unavailable_reason(*more_tools: str) -> str:
    """Return why namespaces cannot be used on this machine, or an empty string."""
    tools = (*TOOLS, *more_tools)
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, tools)):
        return f"needs root, {', '.join(tools)}"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "true"], capture_output=True, check=False
    )
    return "namespaces cannot be created on this machine" if done.returncode else ""


def own_environ() -> dict[str, str]:
    """Return the environment without the UCX variables that a NIXL backend of an earlier test has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Netns:
    """The network namespace of one simulated machine."""

    name: str
    address: str

    @property
    def path(self) -> str:
        return f"/var/run/netns/{self.name}"

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread that uses this network."""
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(self.path,)) as thread:
            return thread.submit(function).result()

    def drop_packets_to(self, address: str) -> None:
        """Send packets for `address` to no machine, so that they are lost without an error.

        It needs no kernel module: the neighbour's hardware address is set to an unused one.
        """
        _ip("-n", self.name, "neigh", "replace", address, "lladdr", _UNUSED_MAC, "dev", "net0", "nud", "permanent")

    def deliver_packets_to(self, address: str) -> None:
        """Undo `drop_packets_to`."""
        _ip("-n", self.name, "neigh", "del", address, "dev", "net0")

    def delete(self) -> None:
        """Delete the namespace. Can be called twice."""
        _delete(self.name)


class Network:
    """Namespaces that can reach each other through a bridge, which has a namespace of its own.

    UCX does not use an interface that is itself a bridge.

    prefix: first three bytes of the addresses; must be unique on this machine.
    """

    def __init__(self, prefix: str, stack: ExitStack) -> None:
        self.prefix = prefix
        self._stack = stack
        self._name = machine_prefix()
        self._bridge = self._create("bridge")
        self._count = 0
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")

    def add(self) -> Netns:
        """Add a namespace. It is deleted with the stack."""
        netns = Netns(name=self._create(str(self._count)), address=f"{self.prefix}.{self._count + 1}")
        port = f"to{self._count}"
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", netns.name)
        self._attach(port)
        _ip("-n", netns.name, "addr", "add", f"{netns.address}/24", "dev", "net0")
        _ip("-n", netns.name, "link", "set", "net0", "up")
        self._count += 1
        return netns

    def join_this_process(self, number: int) -> str:
        """Connect this process to the network.

        `number` is the last byte of its address, which is returned.
        """
        address, device = f"{self.prefix}.{number}", f"{self._name}us"
        self._stack.callback(subprocess.run, ["ip", "link", "del", device], capture_output=True, check=False)
        this = str(os.getpid())
        _ip("-n", self._bridge, "link", "add", device, "type", "veth", "peer", "name", device, "netns", this)
        self._attach(device)
        _ip("addr", "add", f"{address}/24", "dev", device)
        _ip("link", "set", device, "up")
        return address

    def _create(self, suffix: str) -> str:
        """Create a namespace and return its name."""
        name = self._name + suffix
        _ip("netns", "add", name)
        self._stack.callback(_delete, name)
        _ip("-n", name, "link", "set", "lo", "up")
        return name

    def _attach(self, port: str) -> None:
        """Attach a device of the bridge's namespace to the bridge."""
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")


def machine_prefix() -> str:
    """Return the name prefix of all namespaces and devices of this process."""
    return f"bh{os.getpid() % 60_000}-"


def tool(name: str) -> str:
    return shutil.which(name) or name


def pid_below(process: "subprocess.Popen[bytes]") -> int:
    """Return the process id of a command that was started through `nsenter`."""
    return psutil.Process(process.pid).children()[0].pid


def _enter(netns: str) -> None:
    with open(netns) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _delete(netns: str) -> None:
    subprocess.run(["ip", "netns", "del", netns], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
