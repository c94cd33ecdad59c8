"""Follows that arrived before their job, kept for a short time until the job comes."""

from dataclasses import dataclass

from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.messages.peer_messages import Follow
from baton.transfer.owner.lease_deadlines import Deadlines


@dataclass(frozen=True, slots=True)
class EarlyFollow:
    """A Follow, its reader, and the stream on which it arrived."""

    reader: WorkerRef
    message: Follow
    stream_number: int


class EarlyFollows:
    """The last early Follow of each job, for `reorder_window_s` after it has arrived."""

    def __init__(self, reorder_window_s: float) -> None:
        self._reorder_window_s = reorder_window_s
        self._follows: dict[JobId, EarlyFollow] = {}
        self._until: Deadlines[JobId] = Deadlines()

    def __len__(self) -> int:
        return len(self._follows)

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which `pop_passed` must be called next; None if no Follow is kept."""
        return self._until.next_s

    def keep(self, job: JobId, follow: EarlyFollow, now_s: float) -> None:
        """Keep a Follow of a job that is unknown. Replaces an earlier one."""
        self._follows[job] = follow
        self._until.drop(job)
        self._until.set(job, now_s + self._reorder_window_s)

    def pop(self, job: JobId) -> EarlyFollow | None:
        """Remove and return the Follow of a job; None if there is none."""
        self._until.drop(job)
        return self._follows.pop(job, None)

    def drop(self, reader: WorkerRef, transfer_id: TransferId) -> bool:
        """Remove the Follow that this reader has sent for a transfer. Returns False if there is none."""
        for job, follow in self._follows.items():
            if follow.message.transfer_id == transfer_id and follow.reader.is_same_incarnation(reader):
                self.pop(job)
                return True
        return False

    def pop_passed(self, now_s: float) -> list[EarlyFollow]:
        """Remove and return the Follows whose job did not come in time, earliest first."""
        return [self._follows.pop(job) for job in self._until.pop_passed(now_s)]
