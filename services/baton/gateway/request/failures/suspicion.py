"""The suspicion that one request kills workers, and its right to run as the only suspected one."""

from baton.core.cluster.placement import Placement
from baton.core.ids import WorkerRef
from baton.gateway.request.failures.failure_history import FailureHistory
from baton.gateway.request.failures.poison_detector import PoisonDetector

SUSPICIOUS_DEATHS = 2
"""After this many workers in a row died under a request without progress, it runs alone to find out whether
it is the cause."""
TOKENS_AFTER_ONE_STEP_EACH = 2
"""New tokens of an attempt after which both of its workers have run a step. The prefill worker makes the
first."""


class Suspicion:
    """The suspicion against one request, from the first death of a worker under it until it makes progress.

    Another request, or another cause, may have killed the worker. After several deaths the request therefore
    runs alone, on workers that are known to be alive. A death during that run shows that it is the cause.
    """

    def __init__(self, history: FailureHistory, detector: PoisonDetector) -> None:
        self._history = history
        self._detector = detector
        self._runs_alone = False

    @property
    def runs_alone(self) -> bool:
        """True while no other suspected request may start."""
        return self._runs_alone

    @property
    def must_wait(self) -> bool:
        """True if this request is suspected and another one runs alone now."""
        is_running = self._detector.exclusive_lock.locked() and not self._runs_alone
        return bool(self._history.num_killed) and is_running

    async def lock_exclusive_run(self) -> None:
        """Wait until no other suspected request runs alone, if this one must."""
        if self._history.needs_exclusive_run and not self._runs_alone:
            await self._detector.exclusive_lock.acquire()
            self._runs_alone = True

    def track(self, placement: Placement) -> None:
        """Record the workers of an accepted placement, if the request is suspected."""
        if self._history.num_killed:
            for worker in filter(None, (placement.prefill, placement.decode)):
                self._detector.track(self._history.original_request_id, worker)

    def forbids(self, placement: Placement) -> bool:
        """True if the request must not start now, because a death could be due to another one.

        The exclusive run starts on workers without other tracked requests. Until it has made progress or its
        worker has died, no other tracked request starts anywhere.
        """
        if self.must_wait:  # an exclusive run began while the scheduler was asked
            return True
        if not self._runs_alone:
            return False
        workers = [worker for worker in (placement.prefill, placement.decode) if worker is not None]
        return self._detector.tracks_others(self._history.original_request_id, workers)

    def record_progress(self, num_new_tokens: int) -> None:
        """Take note of an attempt's new tokens. A step of each worker clears the suspicion and the deaths."""
        if self._history.num_killed and num_new_tokens >= TOKENS_AFTER_ONE_STEP_EACH:
            # Both workers survived a step with this request, so it did not cause the earlier deaths.
            self._history.num_killed, self._history.needs_exclusive_run = 0, False
            self.clear()

    def record_death(self, worker: WorkerRef) -> None:
        """Count a worker that died while this request was on it."""
        history = self._history
        was_only_suspect = self._detector.was_only_suspect(history.original_request_id, worker)
        if self._runs_alone and was_only_suspect:
            history.is_poison = True
        else:
            history.num_killed += 1
            history.needs_exclusive_run = history.num_killed >= SUSPICIOUS_DEATHS

    def clear(self) -> None:
        """Stop tracking this request, and let the next exclusive run start."""
        self._detector.untrack(self._history.original_request_id)
        if self._runs_alone:
            self._runs_alone = False
            self._detector.exclusive_lock.release()
