"""The failed attempts of a request, and the workers that later attempts avoid."""

from dataclasses import dataclass, field, replace

from baton.core.cluster.placement import Placement
from baton.core.errors import Failure, Reason
from baton.core.ids import Incarnation, WorkerRef
from baton.gateway.cluster.attempt_errors import AttemptFailed
from baton.gateway.request.failures.retry_rules import RetryRules

MAX_FULL_QUEUES = 2
"""After this many workers with a full queue, a new request is rejected, so that its client can retry
elsewhere in time."""


@dataclass(slots=True, kw_only=True)
class FailureHistory:
    """Failed attempts of a request so far.

    original_request_id: id of the client's request; its samples share it after they continue separately.
    num_failed: failed attempts.
    num_killed: workers in a row that died while running the request, without progress in between.
    needs_exclusive_run: the next attempt runs as the only one of the suspected requests.
    is_poison: a worker died during such an attempt.
    avoid: workers on which an attempt failed.
    dead: event loop time at which each dead incarnation was noticed.
    """

    original_request_id: bytes
    num_failed: int = 0
    num_killed: int = 0
    needs_exclusive_run: bool = False
    is_poison: bool = False
    avoid: dict[Incarnation, WorkerRef] = field(default_factory=dict)
    dead: dict[Incarnation, float] = field(default_factory=dict)

    def copy(self) -> "FailureHistory":
        """Return a history that continues separately."""
        return replace(self, avoid=dict(self.avoid), dead=dict(self.dead))

    def record(self, failed: AttemptFailed, now_s: float) -> None:
        """Count a failed attempt, and avoid its workers from now on. `now_s`: event loop time."""
        self.num_failed += 1
        for worker in filter(None, (failed.blamed, failed.dead)):
            self.avoid[worker.incarnation] = worker
        if failed.dead is not None:
            self.dead[failed.dead.incarnation] = now_s

    def allows_retry(self, failure: Failure, rules: RetryRules, *, has_output: bool) -> bool:
        """True if the request may be tried again after an attempt that ended with this failure.

        `has_output`: the client has received tokens.
        """
        is_full = failure.reason in (Reason.QUEUE_FULL, Reason.MEMORY_BUDGET)
        if is_full and self.num_failed >= MAX_FULL_QUEUES and not has_output:
            return False
        return self.num_failed < rules.max_attempts

    def saw_die_since(self, placement: Placement, since_s: float) -> bool:
        """True if the placement names a worker that this request saw die after `since_s`."""
        source = placement.prefix_source.worker if placement.prefix_source else None
        return any(
            worker is not None and self.dead.get(worker.incarnation, since_s) > since_s
            for worker in (placement.prefill, placement.decode, source)
        )
