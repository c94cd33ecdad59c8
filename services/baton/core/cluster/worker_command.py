"""Commands from a scheduler to a worker."""

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef


class CommandKind(Enum):
    """The commands that a scheduler can send to a worker over its report stream.

    SNAPSHOT: publish a snapshot of the cached blocks.
    DRAIN: finish the running work and exit, at an operator's request.
    PROBE_LINK: connect with `peer` and measure the link again.
    CONNECT: connect with `peer` before the pair is used.
    REPLACE: drain and exit now, as this worker has asked to be replaced.
    CLEAR: erase the cached KV of a tenant.
    """

    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    PROBE_LINK = "probe_link"
    CONNECT = "connect"
    REPLACE = "replace"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """One command.

    peer: the other worker, for PROBE_LINK and CONNECT.
    node_shutting_down: the worker's machine is about to stop; for DRAIN.
    tenant_salt: of the tenant; for CLEAR.
    """

    kind: CommandKind
    peer: WorkerRef | None = None
    node_shutting_down: bool = False
    tenant_salt: bytes = b""
