"""What can go wrong with one attempt at a request, as opposed to the request itself."""

from baton.core.errors import BatonError, Code, Failure, Reason
from baton.core.ids import WorkerRef


class WorkerLost(BatonError):
    """A session is over. `has_died`: that life of the worker is gone for good, not just silent."""

    def __init__(self, worker: WorkerRef, reason: Reason, message: str, *, has_died: bool) -> None:
        super().__init__(f"worker {worker} is lost: {message}")
        self.worker = worker
        self.reason = reason
        self.has_died = has_died

    @property
    def failure(self) -> Failure:
        """What a client is told if nobody else can take over."""
        return Failure(
            code=Code.UNAVAILABLE,
            reason=self.reason,
            message=f"{self}; retry",
            retry_after_s=1.0,
            retriable=True,
            blamed=self.worker,
        )


class LegLost(BatonError):
    """An attempt cannot go on, but another may succeed. `dead`: a worker whose life is over; `killed`: it
    died while running a step of this request."""

    def __init__(
        self, failure: Failure, *, blamed: WorkerRef | None = None, dead: WorkerRef | None = None, killed: bool = False
    ) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.blamed = blamed
        self.dead = dead
        self.killed = killed


class Contradiction(BatonError):
    """A worker sent tokens that do not fit what was delivered."""

    @property
    def failure(self) -> Failure:
        return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=str(self), retriable=True)
