"""State machines of requests, sequences and transfers: one enum and one transition table each.

Each machine has one owner. The gateway owns requests, the engine owns sequences, and the transfer package
owns both sides of a transfer.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.core.errors import IllegalTransition


class RequestState(Enum):
    """State of a request at the gateway.

    QUEUED: waiting for a placement. PREFILLING: placed, no token of this attempt yet. DECODING: tokens
    arrive.
    """

    QUEUED = auto()
    PREFILLING = auto()
    DECODING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class SequenceState(Enum):
    """State of a sequence in one engine. RECEIVING: its blocks are allocated, and a pull is filling them."""

    WAITING = auto()
    RECEIVING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class OwnedTransferState(Enum):
    """State of a transfer at the owner of the KV.

    EARLY: the reader's Follow arrived before the job. CREATED: the job arrived, no reader has followed yet.
    FOLLOWED: a reader has followed. ENDED: remembered for `reorder_window_s`, so that late messages are
    recognized.
    """

    EARLY = auto()
    CREATED = auto()
    FOLLOWED = auto()
    ENDED = auto()


class PullState(Enum):
    """State of a transfer at its reader."""

    FOLLOWING = auto()
    WAITING_FOR_MEMORY = auto()
    READING = auto()
    RECEIVED = auto()
    FAILED = auto()


_R, _S, _O, _P = RequestState, SequenceState, OwnedTransferState, PullState
_REQUEST_ENDS = {_R.FINISHED, _R.FAILED, _R.CANCELLED}
_SEQUENCE_ENDS = {_S.FINISHED, _S.FAILED, _S.CANCELLED}

StateT = TypeVar("StateT", bound=Enum)

REQUEST_TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {  # returning to QUEUED starts a new attempt
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
    _O.CREATED: frozenset({_O.FOLLOWED, _O.ENDED}),
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
    """Current state of one machine. Every transition goes through `move`, which checks it against the
    table."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Mapping[StateT, frozenset[StateT]], start: StateT) -> None:
        self._table = table
        self.state = start

    @property
    def has_ended(self) -> bool:
        """True if the current state has no outgoing transition."""
        return not self._table[self.state]

    def move(self, to: StateT) -> None:
        """Change the state to `to`.

        Raises IllegalTransition, and leaves the state unchanged, if the table does not contain the
        transition.
        """
        if to not in self._table[self.state]:
            allowed = ", ".join(sorted(state.name for state in self._table[self.state])) or "none"
            raise IllegalTransition(f"{self.state.name} -> {to.name} is not allowed; allowed from here: {allowed}")
        self.state = to
