"""Commands from a scheduler to a worker."""

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import WorkerRef


class CommandKind(Enum):
    """What a scheduler can ask of a worker over its report stream. DRAIN: finish and leave, as an operator
    wishes. LEAVE: it is this worn-out worker's turn; it drains, and is replaced."""

    SNAPSHOT = "snapshot"
    DRAIN = "drain"
    PROBE_LINK = "probe_link"
    CONNECT = "connect"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """`peer`: the other worker, for PROBE_LINK and CONNECT (warm the pair before it is used).
    `node_shutting_down`: of DRAIN, the worker's machine is about to end."""

    kind: CommandKind
    peer: WorkerRef | None = None
    node_shutting_down: bool = False
