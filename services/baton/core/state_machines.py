"""Every lifecycle as one enum and one table.

Each machine has one owner: requests the gateway, sequences the engine, transfers `transfer`.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.core.errors import IllegalTransition


class RequestState(Enum):
    """A request at the gateway."""

    QUEUED = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class SequenceState(Enum):
    """A sequence in one engine. LANDING: it has its blocks, and a pull is filling them."""

    WAITING = auto()
    RECEIVING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class OwnedTransferState(Enum):
    """A transfer at its owner. BORN: no reader has followed yet. ENDED leaves a tombstone for `early_s`."""

    EARLY = auto()
    BORN = auto()
    FOLLOWED = auto()
    ENDED = auto()


class PullState(Enum):
    """A transfer at its reader."""

    FOLLOWING = auto()
    WAITING_FOR_MEMORY = auto()
    READING = auto()
    RECEIVED = auto()
    FAILED = auto()


_R, _S, _O, _P = RequestState, SequenceState, OwnedTransferState, PullState
_REQUEST_ENDS = {_R.FINISHED, _R.FAILED, _R.CANCELLED}
_SEQUENCE_ENDS = {_S.FINISHED, _S.FAILED, _S.CANCELLED}

StateT = TypeVar("StateT", bound=Enum)

REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {  # back to QUEUED means another attempt
    _R.QUEUED: frozenset({_R.PREFILLING, _R.FAILED, _R.CANCELLED}),
    _R.PREFILLING: frozenset({_R.DECODING, _R.QUEUED, *_REQUEST_ENDS}),
    _R.DECODING: frozenset({_R.QUEUED, *_REQUEST_ENDS}),
    _R.FINISHED: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}

SEQUENCE_TRANSITIONS: Mapping[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.RECEIVING, _S.FAILED, _S.CANCELLED}),
    _S.RECEIVING: frozenset({_S.RUNNING, _S.FINISHED, _S.FAILED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, *_SEQUENCE_ENDS}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FAILED, _S.CANCELLED}),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}

OWNED_TRANSFER_TRANSITIONS: Mapping[OwnedTransferState, frozenset[OwnedTransferState]] = {
    _O.EARLY: frozenset({_O.FOLLOWED, _O.ENDED}),
    _O.BORN: frozenset({_O.FOLLOWED, _O.ENDED}),
    _O.FOLLOWED: frozenset({_O.ENDED}),
    _O.ENDED: frozenset(),
}

PULL_TRANSITIONS: Mapping[PullState, frozenset[PullState]] = {
    _P.FOLLOWING: frozenset({_P.WAITING_FOR_MEMORY, _P.READING, _P.RECEIVED, _P.FAILED}),
    _P.WAITING_FOR_MEMORY: frozenset({_P.READING, _P.RECEIVED, _P.FAILED}),
    _P.READING: frozenset({_P.RECEIVED, _P.FAILED}),
    _P.RECEIVED: frozenset(),
    _P.FAILED: frozenset(),
}


class Lifecycle(Generic[StateT]):
    """One machine's current state; the only place where it moves."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Mapping[StateT, frozenset[StateT]], start: StateT) -> None:
        self._table = table
        self.state = start

    @property
    def has_ended(self) -> bool:
        return not self._table[self.state]

    def move(self, to: StateT) -> None:
        """Raises IllegalTransition, and changes nothing, if the table has no such move."""
        if to not in self._table[self.state]:
            raise IllegalTransition(f"{self.state.name} -> {to.name}")
        self.state = to
