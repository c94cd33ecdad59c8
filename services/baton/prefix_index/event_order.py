"""In which order the events of one worker life count: numbers without gaps, and a snapshot where one is
missing. Pure."""

from enum import Enum

from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, UnreadableEvent


class EventAction(Enum):
    """What became of an event or snapshot. Of those that change what is held, only APPLY is to be put into
    the index."""

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


class EventOrder:
    """Follows one life. It begins with needing a snapshot, of any age; after a missing number it needs one
    that tells it something new."""

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self.event_seq = 0
        """The last event that has been counted: what to read on after."""
        self.needs_snapshot = True
        """Then events do not count until one is taken."""

    def take_event(self, event: KvEvent | UnreadableEvent) -> EventAction:
        """The next entry of the log."""
        if not event.worker.is_same_incarnation(self.worker):
            return EventAction.OTHER_LIFE
        if self.needs_snapshot:
            return EventAction.WAITING
        if event.event_seq <= self.event_seq:
            return EventAction.DUPLICATE
        followed = self._next(event)
        if followed in (EventAction.APPLY, EventAction.SKIPPED):
            self.event_seq = event.event_seq
        else:
            self.needs_snapshot = True
        return followed

    def take_snapshot(self, snapshot: KvSnapshot) -> EventAction:
        """APPLY: what was held before is to be replaced by it. DUPLICATE: none was needed.

        One that is newer than what we know is taken, although there may be a gap behind it still, which then
        shows: how far back a gap reaches is told by an entry that may be anybody's, and a number that no
        snapshot reaches must not stop us for good.
        """
        if not snapshot.worker.is_same_incarnation(self.worker):
            return EventAction.OTHER_LIFE
        if not self.needs_snapshot:
            return EventAction.DUPLICATE
        if snapshot.event_seq <= self.event_seq:
            return EventAction.TOO_OLD
        self.event_seq, self.needs_snapshot = snapshot.event_seq, False
        return EventAction.APPLY

    def begin_anew(self) -> None:
        """What we know is not what that worker said: any snapshot is better."""
        self.event_seq, self.needs_snapshot = 0, True

    def _next(self, event: KvEvent | UnreadableEvent) -> EventAction:
        if isinstance(event, KvEvent) and event.kind is KvEventKind.RESET:
            return EventAction.RESET
        if event.event_seq > self.event_seq + 1:
            return EventAction.GAP
        if isinstance(event, KvEvent):
            return EventAction.APPLY
        return EventAction.SKIPPED if event.is_from_later_release else EventAction.DAMAGED
