"""Names the transport of each pair of workers from UCX's log, which does not say which peer a line is about.

UCX logs a table for each configuration of endpoint and memory when the first read with it is posted. A peer
with the same configuration as an earlier one gets no table of its own. So the first read of each peer is made
alone, and the tables logged meanwhile are its tables. Without any, the peer shares a configuration that was
logged before, and its transport follows only if all that are possible for it have the same name.
"""

import hashlib
import os
import platform
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from baton.transfer.backends.host_memory import HOST, host_id
from baton.transfer.backends.nixl.ucx import UcxLog

UNKNOWN_TRANSPORT = "unknown"
_MEMORY_KINDS = (HOST, "cuda")
_WITHIN_A_MACHINE = frozenset({"cma", "shared-memory", "self"})
"""Transports that reach only peers of one machine. `cuda_ipc` is none: NVLink can connect machines."""
_NAMESPACES = ("ipc", "net", "pid", "user", "uts")
_NOT_A_CHOICE = frozenset({"UCX_LOG_FILE", "UCX_PROTO_INFO", "UCX_LOG_LEVEL"})


def ucx_environment() -> str:
    """Return `MACHINE/DIGEST`: this machine, and what else decides which transports UCX has in this process.

    Processes with equal values use the same transport to a third one: they have the same namespaces, host
    name and UCX variables.
    """
    parts = [platform.node()]
    for name in _NAMESPACES:
        link = Path("/proc/self/ns") / name
        parts.append(os.readlink(link) if link.exists() else "")
    parts += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("UCX_") and k not in _NOT_A_CHOICE)
    return f"{host_id()}/{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """The properties of a peer that decide its transport.

    environment: see `ucx_environment`
    memory_kind: of the peer's memory that is read. UCX chooses a transport for each kind of memory.
    """

    environment: str
    memory_kind: str

    def is_on(self, machine: str) -> bool:
        """Return True if the peer may be on this machine. An empty environment says nothing."""
        return self.environment.split("/")[0] in ("", machine)


class PairTransports:
    """Assigns the transports in UCX's log to peers. Used by one thread."""

    def __init__(self, log: UcxLog) -> None:
        self._log = log
        self._machine = host_id()
        self._logged: defaultdict[str, set[str]] = defaultdict(set)  # by the peer's kind of memory
        self._of_kind: dict[PeerKind, set[str]] = {}

    def begin_first_read(self) -> None:
        """Begin the first read of a peer: what UCX has logged until now belongs to others."""
        for name in self._log.read_transports():
            for memory_kind in _MEMORY_KINDS:
                self._logged[memory_kind].add(name)

    def end_first_read(self, kind: PeerKind, *, was_alone: bool) -> str:
        """Return the transport of a peer whose first read has ended, or `UNKNOWN_TRANSPORT`.

        was_alone: no other peer made its first read meanwhile
        """
        new = set(self._log.read_transports())
        for memory_kind in (kind.memory_kind,) if was_alone else _MEMORY_KINDS:
            self._logged[memory_kind] |= new
        possible = new if was_alone and new else self._shared(kind)
        if len(possible) != 1:
            return UNKNOWN_TRANSPORT
        (name,) = possible
        if kind.environment:
            self._of_kind.setdefault(kind, set()).add(name)
        return name

    def _shared(self, kind: PeerKind) -> set[str]:
        """Return the logged transports that a peer may use which had no table of its own."""
        if kind in self._of_kind:
            return self._of_kind[kind]
        if kind.is_on(self._machine):
            return self._logged[kind.memory_kind]
        return {name for name in self._logged[kind.memory_kind] if not _WITHIN_A_MACHINE & set(name.split("+"))}
