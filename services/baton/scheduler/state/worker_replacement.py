"""Which worn-out workers may leave when: one a role at a time, and the next one only when the one before has
been replaced.

Every scheduler that is active decides, and all decide alike: a wish is answered only once all of them must
have heard of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.cluster.worker_report import WorkerReport, WorkerRole, WorkerState
from baton.core.ids import WorkerRef


@dataclass(slots=True)
class _LetGo:
    """`num_ready`: workers of its role that were ready before it left; `gone_s`: since when it is no longer
    there."""

    worker: WorkerRef
    num_ready: int
    gone_s: float | None = None


class WorkerReplacement:
    """One scheduler's memory of it. `settle_s`: how long a wish must have stood. `back_s`: how long the place
    of one that has left is kept for who replaces it; then the next may go although nobody came."""

    def __init__(self, *, settle_s: float, back_s: float) -> None:
        self._settle_s = settle_s
        self._back_s = back_s
        self._asked_s: dict[WorkerRef, float] = {}
        self._let_go: dict[WorkerRole, _LetGo] = {}

    def choose(self, reports: Sequence[WorkerReport], now_s: float) -> list[WorkerRef]:
        """Who is to be told, at most one a role: also again, as long as one that was told goes on."""
        wishes = [report.worker for report in reports if _asks(report)]
        self._asked_s = {worker: self._asked_s.get(worker, now_s) for worker in wishes}
        chosen = (
            self._choose_of([report for report in reports if report.role is role], role, now_s) for role in WorkerRole
        )
        return [worker for worker in chosen if worker is not None]

    def _choose_of(self, reports: Sequence[WorkerReport], role: WorkerRole, now_s: float) -> WorkerRef | None:
        """`reports`: all of the role's."""
        let_go = self._let_go.get(role)
        if let_go is not None:
            same = next((report for report in reports if report.worker.is_same_incarnation(let_go.worker)), None)
            if same is not None and _asks(same):
                return same.worker
            if not self._is_over(let_go, same, reports, now_s):
                return None
            del self._let_go[role]
        if any(report.state is not WorkerState.READY for report in reports):
            return None
        ripe = [
            report.worker
            for report in reports
            if _asks(report) and now_s - self._asked_s[report.worker] >= self._settle_s
        ]
        if not ripe:
            return None
        worker = min(ripe, key=lambda each: each.worker_id)
        self._let_go[role] = _LetGo(worker, num_ready=len(reports))
        return worker

    def _is_over(
        self, let_go: _LetGo, same: WorkerReport | None, reports: Sequence[WorkerReport], now_s: float
    ) -> bool:
        """Whether the role is as it was before, or need not be waited for any longer."""
        if same is not None:
            return same.state is WorkerState.READY  # its memory has come back before it went: it stays
        if let_go.gone_s is None:
            let_go.gone_s = now_s
        num_ready = sum(report.state is WorkerState.READY for report in reports)
        return num_ready >= let_go.num_ready or now_s - let_go.gone_s >= self._back_s


def _asks(report: WorkerReport) -> bool:
    return report.needs_replacement and report.state is WorkerState.READY
