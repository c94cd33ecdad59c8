"""What one scheduler knows of the cluster: the last report of each worker, and what it has placed on them
since."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, Overlap, WorkerView
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.block_hash import num_blocks_for
from baton.core.step_cost import attended_tokens
from baton.scheduler.state.worker_table import WorkerTableBuilder

MAX_RESERVATIONS = 65_536
MAX_PROMISES = 65_536
NO_OVERLAPS: Mapping[str, Overlap] = {}


@dataclass(slots=True, kw_only=True)
class _Reservation:
    """What one placement takes at one worker. Whole numbers only, so that sums of them come back to 0. Never
    changed; not `frozen`, because making it would take three times as long, and two are made for each
    decision."""

    worker: WorkerRef
    seqs: int
    prefill_tokens: int
    attended_tokens: int
    context_tokens: int
    blocks: int
    read_from: str
    read_bytes: int
    until_s: float


@dataclass(slots=True)
class _Reserved:
    """The sum of a worker's reservations, and the TPOT promises to requests that have not ended."""

    seqs: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    context_tokens: int = 0
    blocks: int = 0
    link_bytes: Counter[str] = field(default_factory=Counter)
    tpot_slos_s: Counter[float] = field(default_factory=Counter)

    def add(self, one: _Reservation, sign: int) -> None:
        self.seqs += sign * one.seqs
        self.prefill_tokens += sign * one.prefill_tokens
        self.attended_tokens += sign * one.attended_tokens
        self.context_tokens += sign * one.context_tokens
        self.blocks += sign * one.blocks
        if one.read_bytes:
            self.link_bytes[one.read_from] += sign * one.read_bytes
            if not self.link_bytes[one.read_from]:
                del self.link_bytes[one.read_from]

    def promise(self, tpot_slo_s: float, sign: int) -> None:
        self.tpot_slos_s[tpot_slo_s] += sign
        if not self.tpot_slos_s[tpot_slo_s]:
            del self.tpot_slos_s[tpot_slo_s]

    def over(self, report: WorkerReport) -> WorkerView:
        return WorkerView(
            report=report,
            reserved_seqs=self.seqs,
            reserved_prefill_tokens=self.prefill_tokens,
            reserved_blocks=self.blocks,
            reserved_attended_tokens=self.attended_tokens,
            reserved_context_tokens=self.context_tokens,
            reserved_link_bytes=dict(self.link_bytes),
            tpot_slo_s=min(self.tpot_slos_s, default=None),
        )


class ClusterState:
    """Single owner: the scheduler's event loop. Nothing here waits or does I/O.

    A reservation stands for a placement that the worker's reports do not contain yet. It ends exactly when a
    report counts its decision, and at the latest `reservation_s` after it was made (the gateway may never
    have sent the job). A promise stands until its request has ended. What a snapshot shows is kept ready as
    reports come, so that making one takes microseconds; only workers whose reservations have changed
    (`_stale`) are brought up to date by it, since mostly several have changed by then.
    """

    def __init__(self, *, silence_s: float, reservation_s: float) -> None:
        self._silence_s = silence_s
        self._reservation_s = reservation_s
        self._reports: dict[str, WorkerReport] = {}
        self._heard_s: dict[str, float] = {}
        self._all_heard_until_s = inf
        self._reservations: OrderedDict[tuple[DecisionId, str], _Reservation] = OrderedDict()
        self._promises: OrderedDict[DecisionId, tuple[WorkerRef, float, float]] = OrderedDict()
        self._reserved: dict[str, _Reserved] = {}
        self._columns = WorkerTableBuilder()
        self._stale: set[str] = set()

    def take_report(self, report: WorkerReport, now_s: float) -> bool:
        """Remember a report. False if a newer one of that life is known already (streams may cross)."""
        worker_id = report.worker.worker_id
        known = self._reports.get(worker_id)
        is_new = known is None or not known.worker.is_same_incarnation(report.worker)
        if known is not None:
            if is_new:
                self._drop(known.worker)
            elif known.report_seq >= report.report_seq:
                return False
        self._reports[worker_id] = report
        self._heard_s[worker_id] = now_s
        self._all_heard_until_s = min(self._all_heard_until_s, now_s + self._silence_s)
        reserved = self._reserved.setdefault(worker_id, _Reserved())
        for decision_id in report.counted_decision_ids:
            counted = self._reservations.pop((decision_id, worker_id), None)
            if counted is not None:
                reserved.add(counted, -1)
        if is_new:
            self._rebuild()
        else:
            self._refresh(worker_id)
        return True

    def lose(self, worker: WorkerRef) -> bool:
        """That life's report stream ended. False if another life has taken its place."""
        known = self._reports.get(worker.worker_id)
        if known is None or not known.worker.is_same_incarnation(worker):
            return False
        del self._reports[worker.worker_id], self._heard_s[worker.worker_id]
        self._drop(worker)
        self._rebuild()
        return True

    def report_of(self, worker: WorkerRef) -> WorkerReport | None:
        """The last one of whoever has that name now."""
        return self._reports.get(worker.worker_id)

    def reserve(self, decision_id: DecisionId, query: PlacementQuery, placement: Placement, now_s: float) -> None:
        """Count a placement at its workers until they count it themselves."""
        until_s = now_s + self._reservation_s
        for worker in (placement.prefill, placement.decode):
            report = self._reports.get(worker.worker_id) if worker is not None else None
            if worker is None or report is None:
                continue
            self._end((decision_id, worker.worker_id))
            one = _reservation(report, query, placement, is_prefill=worker is placement.prefill, until_s=until_s)
            self._reservations[(decision_id, worker.worker_id)] = one
            reserved = self._reserved[worker.worker_id]
            reserved.add(one, 1)
            if worker is placement.decode and query.slo.tpot_s is not None:
                self._promises[decision_id] = (report.worker, query.slo.tpot_s, now_s + query.deadline_s)
                reserved.promise(query.slo.tpot_s, 1)
            self._stale.add(worker.worker_id)
        while len(self._reservations) > MAX_RESERVATIONS:
            self._end(next(iter(self._reservations)))
        while len(self._promises) > MAX_PROMISES:
            self._keep_no_longer(next(iter(self._promises)))

    def release(self, decision_id: DecisionId, worker_ids: tuple[str, ...]) -> None:
        """The placement's request has ended."""
        for worker_id in worker_ids:
            self._end((decision_id, worker_id))
        self._keep_no_longer(decision_id)

    def snapshot(self, now_s: float, overlaps: Mapping[str, Overlap] = NO_OVERLAPS) -> ClusterSnapshot:
        """Workers heard of within `silence_s`, sorted by id, own reservations counted in. `overlaps`: see
        `ClusterSnapshot`."""
        self._expire(now_s)
        self.bring_up_to_date()
        columns = self._columns.columns()
        snapshot = ClusterSnapshot(workers=columns.views, overlaps=overlaps)
        columns.derive_into(snapshot)
        return snapshot

    def bring_up_to_date(self) -> None:
        """What the next snapshot would do first."""
        while self._stale:
            self._refresh(self._stale.pop())

    @property
    def num_prefilling(self) -> int:
        """Ready workers whose role it is to prefill."""
        return sum(r.state is WorkerState.READY and r.role.can_prefill for r in self._reports.values())

    def reports(self) -> tuple[WorkerReport, ...]:
        return tuple(report for _, report in sorted(self._reports.items()))

    def _expire(self, now_s: float) -> None:
        if now_s > self._all_heard_until_s:
            for worker_id in [
                worker_id for worker_id, heard_s in self._heard_s.items() if now_s - heard_s > self._silence_s
            ]:
                self.lose(self._reports[worker_id].worker)
            self._all_heard_until_s = min(self._heard_s.values(), default=inf) + self._silence_s
        while self._reservations:
            key, oldest = next(iter(self._reservations.items()))
            if oldest.until_s > now_s:
                break
            self._end(key)
        while self._promises:
            decision_id, (_, _, until_s) = next(iter(self._promises.items()))
            if until_s > now_s:
                break
            self._keep_no_longer(decision_id)

    def _end(self, key: tuple[DecisionId, str]) -> None:
        ended = self._reservations.pop(key, None)
        if ended is not None:
            self._reserved[ended.worker.worker_id].add(ended, -1)
            self._stale.add(ended.worker.worker_id)

    def _keep_no_longer(self, decision_id: DecisionId) -> None:
        promise = self._promises.pop(decision_id, None)
        if promise is not None:
            worker, tpot_slo_s, _ = promise
            self._reserved[worker.worker_id].promise(tpot_slo_s, -1)
            self._stale.add(worker.worker_id)

    def _refresh(self, worker_id: str) -> None:
        self._stale.discard(worker_id)
        self._columns.update(self._reserved[worker_id].over(self._reports[worker_id]))

    def _drop(self, worker: WorkerRef) -> None:
        """That life is over, and with it all that was placed on it."""
        for key in [key for key, r in self._reservations.items() if r.worker.is_same_incarnation(worker)]:
            del self._reservations[key]
        for decision_id in [
            decision_id for decision_id, (at, _, _) in self._promises.items() if at.is_same_incarnation(worker)
        ]:
            del self._promises[decision_id]
        self._reserved.pop(worker.worker_id, None)

    def _rebuild(self) -> None:
        self._stale.clear()
        self._columns.rebuild(
            [self._reserved[worker_id].over(report) for worker_id, report in sorted(self._reports.items())]
        )


def _reservation(
    report: WorkerReport, query: PlacementQuery, placement: Placement, *, is_prefill: bool, until_s: float
) -> _Reservation:
    """`report`: of the worker in question, which is the placement's prefill or decode worker."""
    block_tokens, block_bytes = report.layout.block_size_tokens, report.layout.block_bytes
    num_blocks = num_blocks_for(query.num_prompt_tokens, block_tokens)
    cached_blocks = placement.prefill_overlap_blocks if is_prefill else placement.decode_overlap_blocks
    new_blocks = num_blocks - cached_blocks  # the others are there, or reserved already by who brings them
    read_from, missing_blocks = "", 0
    if not is_prefill and placement.prefill is not None:
        read_from, missing_blocks = placement.prefill.worker_id, num_blocks - cached_blocks
    elif placement.prefix_source is not None:
        read_from, missing_blocks = (
            placement.prefix_source.worker.worker_id,
            placement.prefix_source.num_blocks - cached_blocks,
        )
        cached_blocks = max(cached_blocks, placement.prefix_source.num_blocks)
    computes = is_prefill or placement.prefill is None
    cached_tokens = min(query.num_prompt_tokens, cached_blocks * block_tokens)
    new_tokens = query.num_prompt_tokens - cached_tokens if computes else 0
    return _Reservation(
        worker=report.worker,
        seqs=1 if is_prefill else query.sample_count,
        prefill_tokens=new_tokens,
        attended_tokens=attended_tokens(new_tokens, cached_tokens),
        context_tokens=0 if is_prefill else query.num_prompt_tokens * query.sample_count,
        blocks=max(0, new_blocks),
        read_from=read_from,
        read_bytes=max(0, missing_blocks) * block_bytes,
        until_s=until_s,
    )
