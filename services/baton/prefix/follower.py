"""In which order the events of one worker life count: numbers without gaps, and a snapshot where one is missing. Pure."""

from enum import Enum

from baton.core.ids import WorkerRef
from baton.core.kv_events import KvEvent, KvEventKind, KvSnapshot, UnreadableEvent


class Followed(Enum):
    """What became of an event or snapshot. Of those that change what is held, only APPLY is to be put into the index."""

    APPLY = "apply"
    SKIPPED = "skipped"
    """Of a later release, and about nothing that we could use: counted."""
    DUPLICATE = "duplicate"
    """Counted already."""
    GAP = "gap"
    """Numbers before it are missing: a snapshot is needed. So it is after RESET and DAMAGED."""
    RESET = "reset"
    DAMAGED = "damaged"
    WAITING = "waiting"
    """A snapshot is needed first; the event is to be read again after it."""
    TOO_OLD = "too_old"
    """A snapshot that says nothing new: the worker has to be asked for another one."""
    OTHER_LIFE = "other_life"


class Follower:
    """Follows one life. It begins with needing a snapshot, of any age; after a missing number it needs one that tells it something new."""

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self.event_seq = 0
        """The last event that has been counted: what to read on after."""
        self.needs_snapshot = True
        """Then events do not count until one is taken."""

    def take_event(self, event: KvEvent | UnreadableEvent) -> Followed:
        """The next entry of the log."""
        if not event.worker.is_same_life(self.worker):
            return Followed.OTHER_LIFE
        if self.needs_snapshot:
            return Followed.WAITING
        if event.event_seq <= self.event_seq:
            return Followed.DUPLICATE
        followed = self._next(event)
        if followed in (Followed.APPLY, Followed.SKIPPED):
            self.event_seq = event.event_seq
        else:
            self.needs_snapshot = True
        return followed

    def take_snapshot(self, snapshot: KvSnapshot) -> Followed:
        """APPLY: what was held before is to be replaced by it. DUPLICATE: none was needed.

        One that is newer than what we know is taken, although there may be a gap behind it still, which then shows: how far back a gap
        reaches is told by an entry that may be anybody's, and a number that no snapshot reaches must not stop us for good.
        """
        if not snapshot.worker.is_same_life(self.worker):
            return Followed.OTHER_LIFE
        if not self.needs_snapshot:
            return Followed.DUPLICATE
        if snapshot.event_seq <= self.event_seq:
            return Followed.TOO_OLD
        self.event_seq, self.needs_snapshot = snapshot.event_seq, False
        return Followed.APPLY

    def begin_anew(self) -> None:
        """What we know is not what that worker said: any snapshot is better."""
        self.event_seq, self.needs_snapshot = 0, True

    def _next(self, event: KvEvent | UnreadableEvent) -> Followed:
        if isinstance(event, KvEvent) and event.kind is KvEventKind.RESET:
            return Followed.RESET
        if event.event_seq > self.event_seq + 1:
            return Followed.GAP
        if isinstance(event, KvEvent):
            return Followed.APPLY
        return Followed.SKIPPED if event.is_from_later_release else Followed.DAMAGED
