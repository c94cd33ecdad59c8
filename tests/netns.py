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
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)


class Network:
    """Namespaces that can reach each other. The first one contains the bridge.

    prefix: first three bytes of the addresses; must be unique on this machine.
    """

    def __init__(self, prefix: str, stack: ExitStack) -> None:
        self.prefix = prefix
        self._stack = stack
        self._name = machine_prefix()
        self._bridge: Netns | None = None
        self._count = 0

    def add(self) -> Netns:
        """Add a namespace. It is deleted with the stack."""
        netns = Netns(name=f"{self._name}{self._count}", address=f"{self.prefix}.{self._count + 1}")
        _ip("netns", "add", netns.name)
        self._stack.callback(netns.delete)
        _ip("-n", netns.name, "link", "set", "lo", "up")
        if self._bridge is None:
            self._bridge = netns
            _ip("-n", netns.name, "link", "add", "net0", "type", "bridge")
        else:
            self._join(netns.name)
        _ip("-n", netns.name, "addr", "add", f"{netns.address}/24", "dev", "net0")
        _ip("-n", netns.name, "link", "set", "net0", "up")
        self._count += 1
        return netns

    def join_this_process(self, number: int) -> str:
        """Connect this process to the network.

        `number` is the last byte of its address, which is returned.
        """
        assert self._bridge is not None
        address, device = f"{self.prefix}.{number}", f"{self._name}us"
        self._stack.callback(subprocess.run, ["ip", "link", "del", device], capture_output=True, check=False)
        _ip(
            "-n",
            self._bridge.name,
            "link",
            "add",
            device,
            "type",
            "veth",
            "peer",
            "name",
            device,
            "netns",
            str(os.getpid()),
        )
        _ip("-n", self._bridge.name, "link", "set", device, "master", "net0", "up")
        _ip("addr", "add", f"{address}/24", "dev", device)
        _ip("link", "set", device, "up")
        return address

    def _join(self, netns: str) -> None:
        assert self._bridge is not None
        port = f"to{self._count}"
        _ip("-n", self._bridge.name, "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", netns)
        _ip("-n", self._bridge.name, "link", "set", port, "master", "net0", "up")


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


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
