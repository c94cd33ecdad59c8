"""Follows that arrived before their job, kept for a short time until the job comes."""

from dataclasses import dataclass

from baton.core.ids import Incarnation, JobId, TransferId, WorkerRef
from baton.core.messages.peer_messages import Follow
from baton.transfer.owner.lease_deadlines import Deadlines

MAX_EARLY_FOLLOWS = 65_536
"""Early Follows that an owner keeps. Further ones are refused with LEASE_LOST."""


@dataclass(frozen=True, slots=True)
class EarlyFollow:
    """A Follow, its reader, and the stream on which it arrived."""

    reader: WorkerRef
    message: Follow
    stream_number: int


class EarlyFollows:
    """The last early Follow of each job, for `reorder_window_s` after it has arrived.

    At most `MAX_EARLY_FOLLOWS` are kept.
    """

    def __init__(self, reorder_window_s: float) -> None:
        self._reorder_window_s = reorder_window_s
        self._follows: dict[JobId, EarlyFollow] = {}
        self._jobs: dict[tuple[Incarnation, TransferId], JobId] = {}  # by the reader's transfer
        self._until: Deadlines[JobId] = Deadlines()

    def __len__(self) -> int:
        return len(self._follows)

    @property
    def next_deadline_s(self) -> float | None:
        """The time at which `pop_passed` must be called next; None if no Follow is kept."""
        return self._until.next_s

    def keep(self, job: JobId, follow: EarlyFollow, now_s: float) -> bool:
        """Keep a Follow of a job that is unknown, in place of an earlier one.

        Returns False if too many are kept.
        """
        self.pop(job)
        if len(self._follows) >= MAX_EARLY_FOLLOWS:
            return False
        self._follows[job] = follow
        self._jobs[_transfer_of(follow)] = job
        self._until.set(job, now_s + self._reorder_window_s)
        return True

    def pop(self, job: JobId) -> EarlyFollow | None:
        """Remove and return the Follow of a job; None if there is none."""
        self._until.drop(job)
        return self._remove(job)

    def drop(self, reader: WorkerRef, transfer_id: TransferId) -> bool:
        """Remove the Follow that this reader has sent for a transfer. Returns False if there is none."""
        job = self._jobs.get((reader.incarnation, transfer_id))
        return job is not None and self.pop(job) is not None

    def pop_passed(self, now_s: float) -> list[EarlyFollow]:
        """Remove and return the Follows whose job did not come in time, earliest first."""
        removed = [self._remove(job) for job in self._until.pop_passed(now_s)]
        return [follow for follow in removed if follow is not None]

    def _remove(self, job: JobId) -> EarlyFollow | None:
        follow = self._follows.pop(job, None)
        if follow is not None and self._jobs.get(_transfer_of(follow)) == job:
            del self._jobs[_transfer_of(follow)]
        return follow


def _transfer_of(follow: EarlyFollow) -> tuple[Incarnation, TransferId]:
    return follow.reader.incarnation, follow.message.transfer_id
