"""Errors of one attempt, after which another attempt at the request may still succeed."""

from baton.core.errors import BatonError, Code, Failure, Reason
from baton.core.ids import WorkerRef


class WorkerLost(BatonError):
    """The session with a worker has ended. `has_died` is True if the incarnation is known to be gone, not
    just silent."""

    def __init__(self, worker: WorkerRef, reason: Reason, message: str, *, has_died: bool) -> None:
        super().__init__(f"worker {worker} is lost: {message}")
        self.worker = worker
        self.reason = reason
        self.has_died = has_died

    @property
    def failure(self) -> Failure:
        """The failure that a client gets if no other worker can continue the request."""
        return Failure(
            code=Code.UNAVAILABLE,
            reason=self.reason,
            message=f"worker {self.worker.worker_id} was lost; retry",
            retry_after_s=1.0,
            retriable=True,
            blamed=self.worker,
        )


class AttemptFailed(BatonError):
    """An attempt failed, and another one may succeed.

    failure: the failure that the client gets if no attempt follows.
    blamed: worker that later attempts avoid.
    dead: worker whose incarnation is gone.
    killed: `dead` died while running a step of this request.
    """

    def __init__(
        self, failure: Failure, *, blamed: WorkerRef | None = None, dead: WorkerRef | None = None, killed: bool = False
    ) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.blamed = blamed
        self.dead = dead
        self.killed = killed


class ConflictingTokens(BatonError):
    """A worker sent tokens that conflict with those already delivered to the client."""

    @property
    def failure(self) -> Failure:
        """The failure that a client gets if no attempt follows."""
        return Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=str(self), retriable=True)
