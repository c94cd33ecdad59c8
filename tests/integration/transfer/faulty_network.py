"""A network of simulated machines that loses, delays, duplicates, reorders and slows packets. Needs root.

Each machine is a network namespace with one TUN device. A thread of this process forwards IP packets between
the devices, so that no kernel module for faulty networks is needed. What happens to a packet is drawn from a
seeded generator; which packets there are depends on the processes.
"""

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from tests.netns import Netns, machine_prefix, unavailable_reason

DEVICE = "tun0"
MTU = 4096
MAX_QUEUED_BYTES = 16 * 2**20
"""Limit of all delayed packets. More are lost, as in a switch whose buffer is full."""
MAX_BACKLOG_S = 0.4
"""Longest queue of a slow link. Packets that would wait longer are lost."""
_TUN = Path("/dev/net/tun")
_SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_READS_PER_WAKE = 64
_TCP, _UDP = 6, 17
_numbers = count()


def faulty_network_unavailable_reason() -> str:
    """Return why such a network is not possible on this machine, or an empty string."""
    return unavailable_reason() or ("" if _TUN.exists() else f"needs {_TUN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a network or of one link. The shares are of packets.

    delay_s: shortest and longest delay
    reorder_share: packets that wait another `reorder_s`, so that later ones overtake them
    bytes_per_s: speed in each direction; None: unlimited
    ports: only packets with a source or destination port in this range, both inclusive; None: all
    """

    loss_share: float = 0.0
    duplicate_share: float = 0.0
    reorder_share: float = 0.0
    reorder_s: float = 0.005
    delay_s: tuple[float, float] = (0.0, 0.0)
    bytes_per_s: float | None = None
    ports: tuple[int, int] | None = None


CUT = Faults(loss_share=1.0)


@dataclass(slots=True)
class PacketCounts:
    """Numbers of packets since the start."""

    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    overflowed: int = 0


@dataclass(slots=True)
class _Link:
    """One direction between two machines. `free_s`: when a slow link has sent all that was queued."""

    faults: Faults | None = None
    free_s: float = 0.0


@dataclass(order=True, slots=True)
class _Delayed:
    due_s: float
    number: int
    target: int = field(compare=False)
    packet: bytes = field(compare=False)


class FaultyNetwork:
    """Machines that reach each other only through a thread that applies faults. Used as a context manager.

    faults: of all packets between different machines, unless `set_link` names others
    counts: what has happened to packets
    """

    def __init__(self, seed: int) -> None:
        number = os.getpid() % 10_000 * 4 + next(_numbers) % 4
        self.prefix = f"10.{150 + number // 256 % 40}.{number % 256}"
        self.faults = Faults()
        self.counts = PacketCounts()
        self._rng = Random(seed)
        self._stack = ExitStack()
        self._fds: dict[int, int] = {}
        self._links: defaultdict[tuple[int, int], _Link] = defaultdict(_Link)
        self._delayed: list[_Delayed] = []
        self._queued_bytes = 0
        self._order = count()
        self._count = 0
        self._is_closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake_read, select.POLLIN)
        self._thread = threading.Thread(target=self._forward, name="faulty-network", daemon=True)

    def __enter__(self) -> "FaultyNetwork":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_closing = True
        os.write(self._wake_write, b"!")
        self._thread.join()
        self._stack.close()
        for fd in (*self._fds.values(), self._wake_read, self._wake_write):
            os.close(fd)

    def add(self) -> Netns:
        """Add a machine."""
        netns = Netns(name=f"{machine_prefix()}f{next(_numbers)}", address=f"{self.prefix}.{self._count + 1}")
        _run("ip", "netns", "add", netns.name)
        self._stack.callback(netns.delete)
        _run("ip", "-n", netns.name, "link", "set", "lo", "up")
        self._attach(netns.call(lambda: _open_tun(DEVICE)), ("-n", netns.name), DEVICE, netns.address)
        return netns

    def join_this_process(self) -> str:
        """Connect this process to the network and return its address."""
        device = f"bf{os.getpid() % 60_000}x{next(_numbers)}"
        address = f"{self.prefix}.{self._count + 1}"
        self._attach(_open_tun(device), (), device, address)
        return address

    def set_link(self, a: str, b: str, faults: Faults | None) -> None:
        """Set the faults between two addresses, in both directions; None: those of the network."""
        for source, target in ((a, b), (b, a)):
            self._links[_host(source), _host(target)].faults = faults

    def _attach(self, fd: int, where: tuple[str, ...], device: str, address: str) -> None:
        _run("ip", *where, "addr", "add", f"{address}/24", "dev", device)
        _run("ip", *where, "link", "set", device, "mtu", str(MTU), "up")
        self._count += 1
        self._fds[self._count] = fd
        self._poller.register(fd, select.POLLIN)
        os.write(self._wake_write, b"!")  # the running poll does not see the new descriptor

    # -- in the thread -----------------------------------------------------------------------------

    def _forward(self) -> None:
        while not self._is_closing:
            wait_ms = -1 if not self._delayed else max(0, int((self._delayed[0].due_s - time.monotonic()) * 1000))
            for fd, _event in self._poller.poll(wait_ms):
                if fd == self._wake_read:
                    os.read(fd, 4096)
                    continue
                with suppress(OSError):  # no packet is left, or the device is gone
                    for _read in range(_READS_PER_WAKE):
                        self._pass_on(os.read(fd, 65_536))
            now_s = time.monotonic()
            while self._delayed and self._delayed[0].due_s <= now_s:
                delayed = heapq.heappop(self._delayed)
                self._queued_bytes -= len(delayed.packet)
                self._deliver(delayed.target, delayed.packet)

    def _pass_on(self, packet: bytes) -> None:
        if packet[0] >> 4 != 4:
            return  # IPv6 neighbour discovery
        source, target = packet[15], packet[19]
        if target not in self._fds:
            return
        link = self._links[source, target]
        faults = link.faults if link.faults is not None else self.faults
        if faults.ports is not None and not _uses_ports(packet, faults.ports):
            faults = self.faults
        rng = self._rng
        if rng.random() < faults.loss_share:
            self.counts.lost += 1
            return
        delay_s = rng.uniform(*faults.delay_s)
        if rng.random() < faults.reorder_share:
            self.counts.reordered += 1
            delay_s += faults.reorder_s
        if faults.bytes_per_s is not None:
            now_s = time.monotonic()
            if link.free_s - now_s > MAX_BACKLOG_S:
                self.counts.overflowed += 1
                return
            link.free_s = max(now_s, link.free_s) + len(packet) / faults.bytes_per_s
            delay_s += link.free_s - now_s
        copies = 2 if rng.random() < faults.duplicate_share else 1
        self.counts.duplicated += copies - 1
        for _copy in range(copies):
            self._deliver_later(target, packet, delay_s)

    def _deliver_later(self, target: int, packet: bytes, delay_s: float) -> None:
        if delay_s <= 0:
            self._deliver(target, packet)
        elif self._queued_bytes + len(packet) > MAX_QUEUED_BYTES:
            self.counts.overflowed += 1
        else:
            self._queued_bytes += len(packet)
            heapq.heappush(self._delayed, _Delayed(time.monotonic() + delay_s, next(self._order), target, packet))

    def _deliver(self, target: int, packet: bytes) -> None:
        with suppress(OSError):  # the machine is gone
            os.write(self._fds[target], packet)
            self.counts.delivered += 1


def _open_tun(device: str) -> int:
    """Create a TUN device in the namespace of this thread. Returns its descriptor."""
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEADER))
    return fd


def _uses_ports(packet: bytes, ports: tuple[int, int]) -> bool:
    header_bytes = (packet[0] & 0xF) * 4
    if packet[9] not in (_TCP, _UDP) or len(packet) < header_bytes + 4:
        return False
    return any(ports[0] <= port <= ports[1] for port in struct.unpack_from("!HH", packet, header_bytes))


def _host(address: str) -> int:
    return int(address.rsplit(".", 1)[1])


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
