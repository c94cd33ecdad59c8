"""Decides which events of a worker incarnation are applied: events are numbered, and a gap requires a
snapshot."""

from enum import Enum

from baton.core.ids import WorkerRef
from baton.core.kv.kv_events import KvEvent, KvEventKind, KvSnapshot, UnreadableEvent


class EventAction(Enum):
    """The decision about an event or snapshot. Only APPLY changes the index.

    APPLY: apply it to the index.
    SKIPPED: an event kind of a later release, which does not affect the index. Its number counts.
    DUPLICATE: applied already; or a snapshot that is not needed.
    GAP: earlier events are missing, so a snapshot is needed.
    RESET: the worker has reset its log, so a snapshot is needed.
    DAMAGED: the event is unreadable, so a snapshot is needed.
    WAITING: a snapshot is needed first. Read the event again after it.
    TOO_OLD: the snapshot has nothing new. Ask the worker for another one.
    OTHER_INCARNATION: it belongs to another incarnation of the worker.
    """

    APPLY = "apply"
    SKIPPED = "skipped"
    DUPLICATE = "duplicate"
    GAP = "gap"
    RESET = "reset"
    DAMAGED = "damaged"
    WAITING = "waiting"
    TOO_OLD = "too_old"
    OTHER_INCARNATION = "other_incarnation"


class EventOrder:
    """Tracks the event numbers of one worker incarnation.

    At first it needs a snapshot of any age. After a gap it needs a snapshot that is newer than the last
    event.
    """

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self.event_seq = 0  # number of the last event that was applied or skipped; read on after it
        self.needs_snapshot = True  # events are not applied until a snapshot was

    def take_event(self, event: KvEvent | UnreadableEvent) -> EventAction:
        """Decide about the next event of the log, and advance."""
        if not event.worker.is_same_incarnation(self.worker):
            return EventAction.OTHER_INCARNATION
        if self.needs_snapshot:
            return EventAction.WAITING
        if event.event_seq <= self.event_seq:
            return EventAction.DUPLICATE
        action = self._next(event)
        if action in (EventAction.APPLY, EventAction.SKIPPED):
            self.event_seq = event.event_seq
        else:
            self.needs_snapshot = True
        return action

    def take_snapshot(self, snapshot: KvSnapshot) -> EventAction:
        """Decide about a snapshot. With APPLY, the snapshot replaces everything that the worker held before.

        A snapshot that is newer than the last applied event is accepted, even if it does not reach the event
        that showed the gap. Otherwise one corrupt event with a huge number would block the worker's events
        forever. If events are still missing, the next event shows another gap.
        """
        if not snapshot.worker.is_same_incarnation(self.worker):
            return EventAction.OTHER_INCARNATION
        if not self.needs_snapshot:
            return EventAction.DUPLICATE
        if snapshot.event_seq <= self.event_seq:
            return EventAction.TOO_OLD
        self.event_seq, self.needs_snapshot = snapshot.event_seq, False
        return EventAction.APPLY

    def restart(self) -> None:
        """Forget the position, because the index differs from the worker. Any snapshot is accepted next."""
        self.event_seq, self.needs_snapshot = 0, True

    def _next(self, event: KvEvent | UnreadableEvent) -> EventAction:
        if isinstance(event, KvEvent) and event.kind is KvEventKind.RESET:
            return EventAction.RESET
        if event.event_seq > self.event_seq + 1:
            return EventAction.GAP
        if isinstance(event, KvEvent):
            return EventAction.APPLY
        return EventAction.SKIPPED if event.is_from_later_release else EventAction.DAMAGED
