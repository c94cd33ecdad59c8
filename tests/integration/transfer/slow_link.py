"""Two network namespaces joined by a link of limited speed. Needs root and iproute2; Linux only."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

_numbers = count()
ENV = {"UCX_TLS": "tcp", "PEER_LOOPBACK": "0"}
"""Excludes `cma`, which UCX would use across network namespaces because the processes share a kernel."""


@dataclass(frozen=True)
class LinkEnd:
    netns: str
    address: str

    @property
    def env(self) -> dict[str, str]:
        return {**ENV, "PEER_HOST": self.address}


def skip_reason() -> str:
    """Return why a slow link cannot be set up here, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs root, ip and tc"
    name = f"baton-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be created on this machine"
    _run(f"ip netns del {name}")
    return ""


@contextmanager
def slow_link(rate: str) -> Iterator[tuple[LinkEnd, LinkEnd]]:
    """Yield both ends of a link. `rate`: in tc's format (`40mbit`), for both directions."""
    number = next(_numbers) + os.getpid() % 20_000 * 3
    name, network = f"bt{number}", f"10.{200 + number // 65536 % 50}.{number // 256 % 256}.{number % 64 * 4}"
    base, last = network.rsplit(".", 1)
    ends = [LinkEnd(f"{name}{which}", f"{base}.{int(last) + host}") for which, host in (("a", 1), ("b", 2))]
    try:
        for end in ends:
            _run(f"ip netns add {end.netns}")
            _run(f"ip -n {end.netns} link set lo up")
        _run(f"ip link add {ends[0].netns} type veth peer name {ends[1].netns}")
        for end in ends:
            _run(f"ip link set {end.netns} netns {end.netns}")
            _run(f"ip -n {end.netns} addr add {end.address}/30 dev {end.netns}")
            _run(f"ip -n {end.netns} link set {end.netns} up")
            _run(
                f"ip netns exec {end.netns} tc qdisc add dev {end.netns} root "
                f"tbf rate {rate} burst 32kbit latency 400ms"
            )
        yield ends[0], ends[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.netns], capture_output=True, check=False)


def sent_bytes(end: LinkEnd) -> int:
    """Return the bytes that were sent through the link, to verify that a transfer was running."""
    statistics = _run(f"ip -n {end.netns} -s link show {end.netns}").split("TX:")[1].splitlines()[1]
    return int(statistics.split()[0])


def _run(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, check=True, text=True).stdout
