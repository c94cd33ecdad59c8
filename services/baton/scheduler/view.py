"""What one scheduler knows of the cluster: the last report of each worker, and what it has placed on them since."""

from collections import OrderedDict
from dataclasses import dataclass

from baton.core.blocks import num_blocks_for
from baton.core.cluster import ClusterSnapshot, Placement, PlacementQuery, WorkerReport, WorkerView
from baton.core.ids import DecisionId, WorkerRef

MAX_RESERVATIONS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    worker: WorkerRef
    seqs: int
    prefill_tokens: int
    blocks: int
    until_s: float


class ClusterView:
    """Single owner: the scheduler's event loop. Nothing here waits or does I/O.

    A reservation stands for a placement that the worker's reports do not contain yet. It ends exactly when a report counts
    its decision, and at the latest `reservation_s` after it was made (the gateway may never have sent the job).
    """

    def __init__(self, *, silence_s: float, reservation_s: float) -> None:
        self._silence_s = silence_s
        self._reservation_s = reservation_s
        self._reports: dict[str, tuple[WorkerReport, float]] = {}
        self._reservations: OrderedDict[tuple[DecisionId, str], _Reservation] = OrderedDict()

    def take_report(self, report: WorkerReport, now_s: float) -> bool:
        """Remember a report. False if a newer one of that life is known already (streams may cross)."""
        known = self._reports.get(report.worker.worker_id)
        if known is not None:
            same_life = known[0].worker.is_same_life(report.worker)
            if same_life and known[0].report_seq >= report.report_seq:
                return False
            if not same_life:
                self._drop_reservations(known[0].worker)
        self._reports[report.worker.worker_id] = (report, now_s)
        for decision_id in report.counted_decision_ids:
            self._reservations.pop((decision_id, report.worker.worker_id), None)
        return True

    def lose(self, worker: WorkerRef) -> bool:
        """That life's report stream ended. False if another life has taken its place."""
        known = self._reports.get(worker.worker_id)
        if known is None or not known[0].worker.is_same_life(worker):
            return False
        del self._reports[worker.worker_id]
        self._drop_reservations(worker)
        return True

    def reserve(self, decision_id: DecisionId, query: PlacementQuery, placement: Placement, now_s: float) -> None:
        """Count a placement at its workers until they count it themselves."""
        until_s = now_s + self._reservation_s
        for worker, is_prefill in ((placement.prefill, True), (placement.decode, False)):
            known = self._reports.get(worker.worker_id) if worker is not None else None
            if worker is None or known is None:
                continue
            computes = is_prefill or placement.prefill is None
            self._reservations[(decision_id, worker.worker_id)] = _Reservation(
                worker=worker,
                seqs=1 if is_prefill else query.sample_count,
                prefill_tokens=query.num_prompt_tokens if computes else 0,
                blocks=num_blocks_for(query.num_prompt_tokens, known[0].layout.block_size_tokens),
                until_s=until_s,
            )
        while len(self._reservations) > MAX_RESERVATIONS:
            self._reservations.popitem(last=False)

    def release(self, decision_id: DecisionId, worker_ids: tuple[str, ...]) -> None:
        """The placement's request has ended."""
        for worker_id in worker_ids:
            self._reservations.pop((decision_id, worker_id), None)

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """Workers heard of within `silence_s`, sorted by id, own reservations counted in."""
        self._expire(now_s)
        reserved: dict[str, list[_Reservation]] = {}
        for (_, worker_id), reservation in self._reservations.items():
            reserved.setdefault(worker_id, []).append(reservation)
        return ClusterSnapshot(
            workers=tuple(
                WorkerView(
                    report=report,
                    reserved_seqs=sum(r.seqs for r in reserved.get(worker_id, ())),
                    reserved_prefill_tokens=sum(r.prefill_tokens for r in reserved.get(worker_id, ())),
                    reserved_blocks=sum(r.blocks for r in reserved.get(worker_id, ())),
                )
                for worker_id, (report, _) in sorted(self._reports.items())
            )
        )

    def reports(self) -> tuple[WorkerReport, ...]:
        return tuple(report for _, (report, _) in sorted(self._reports.items()))

    def _expire(self, now_s: float) -> None:
        silent = [report.worker for report, heard_s in self._reports.values() if now_s - heard_s > self._silence_s]
        for worker in silent:
            self.lose(worker)
        while self._reservations:
            key, oldest = next(iter(self._reservations.items()))
            if oldest.until_s > now_s:
                break
            del self._reservations[key]

    def _drop_reservations(self, worker: WorkerRef) -> None:
        for key in [key for key, r in self._reservations.items() if r.worker.is_same_life(worker)]:
            del self._reservations[key]
