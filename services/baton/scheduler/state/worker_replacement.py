"""Decides when a worker that needs replacement is told to drain.

Only one worker per role is replaced at a time, and the next one only after its replacement is ready. All
active schedulers decide independently and must decide the same. A request for replacement is therefore
answered only after a time within which every scheduler has received it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.cluster.worker_report import WorkerReport, WorkerRole, WorkerState
from baton.core.ids import WorkerRef


@dataclass(slots=True)
class _Replacement:
    """A replacement under way.

    num_ready: workers of the role that were ready before.
    gone_s: when the old worker was first missing.
    """

    worker: WorkerRef
    num_ready: int
    gone_s: float | None = None


class WorkerReplacement:
    """Chooses the workers to be replaced, from the reports that one scheduler receives."""

    def __init__(self, *, settle_s: float, max_wait_s: float) -> None:
        """`settle_s`: time for which a worker must have asked.

        `max_wait_s`: longest wait for its replacement.
        """
        self._settle_s = settle_s
        self._max_wait_s = max_wait_s
        self._asked_s: dict[WorkerRef, float] = {}
        self._under_way: dict[WorkerRole, _Replacement] = {}

    def choose(self, reports: Sequence[WorkerReport], now_s: float) -> list[WorkerRef]:
        """Return the workers to be told now, at most one per role.

        A worker that was told is returned again until its report shows that it drains.
        """
        asking = [report.worker for report in reports if _asks(report)]
        self._asked_s = {worker: self._asked_s.get(worker, now_s) for worker in asking}
        chosen = (
            self._choose_of_role([report for report in reports if report.role is role], role, now_s)
            for role in WorkerRole
        )
        return [worker for worker in chosen if worker is not None]

    def _choose_of_role(self, reports: Sequence[WorkerReport], role: WorkerRole, now_s: float) -> WorkerRef | None:
        """Choose among the reports of all workers of the role."""
        under_way = self._under_way.get(role)
        if under_way is not None:
            same = next((report for report in reports if report.worker.is_same_incarnation(under_way.worker)), None)
            if same is not None and _asks(same):
                return same.worker
            if not self._is_over(under_way, same, reports, now_s):
                return None
            del self._under_way[role]
        if any(report.state is not WorkerState.READY for report in reports):
            return None
        settled = [
            report.worker
            for report in reports
            if _asks(report) and now_s - self._asked_s[report.worker] >= self._settle_s
        ]
        if not settled:
            return None
        worker = min(settled, key=lambda each: each.worker_id)
        self._under_way[role] = _Replacement(worker, num_ready=len(reports))
        return worker

    def _is_over(
        self, under_way: _Replacement, same: WorkerReport | None, reports: Sequence[WorkerReport], now_s: float
    ) -> bool:
        """True if the role has as many ready workers as before, or has waited for `max_wait_s`."""
        if same is not None:
            return same.state is WorkerState.READY  # its quarantined blocks became free before it drained
        if under_way.gone_s is None:
            under_way.gone_s = now_s
        num_ready = sum(report.state is WorkerState.READY for report in reports)
        return num_ready >= under_way.num_ready or now_s - under_way.gone_s >= self._max_wait_s


def _asks(report: WorkerReport) -> bool:
    return report.needs_replacement and report.state is WorkerState.READY
