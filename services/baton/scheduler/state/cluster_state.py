"""Holds what one scheduler knows about the workers: their last reports, and its own placements since then."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, Overlap, WorkerView
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.core.ids import DecisionId, WorkerRef
from baton.core.step_cost import attended_tokens
from baton.scheduler.state.worker_table import WorkerTableBuilder

MAX_RESERVATIONS = 65_536
MAX_TPOT_SLOS = 65_536
NO_OVERLAPS: Mapping[str, Overlap] = {}


@dataclass(slots=True, kw_only=True)
class _Reservation:
    """Resources that one placement takes on one worker, until the worker's reports contain it.

    All amounts are integers, so that adding and subtracting them returns to exactly 0. Never changed; not
    `frozen`, because that would make construction, twice per decision, three times as slow.
    """

    worker: WorkerRef
    seqs: int
    prefill_tokens: int
    attended_tokens: int
    context_tokens: int
    blocks: int
    read_from: str
    read_bytes: int
    expires_s: float


@dataclass(slots=True)
class _ReservedTotals:
    """The sums of one worker's reservations, and the TPOT SLOs of its unfinished requests."""

    seqs: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    context_tokens: int = 0
    blocks: int = 0
    link_bytes: Counter[str] = field(default_factory=Counter)
    tpot_slos_s: Counter[float] = field(default_factory=Counter)

    def add(self, reservation: _Reservation, sign: int) -> None:
        self.seqs += sign * reservation.seqs
        self.prefill_tokens += sign * reservation.prefill_tokens
        self.attended_tokens += sign * reservation.attended_tokens
        self.context_tokens += sign * reservation.context_tokens
        self.blocks += sign * reservation.blocks
        if reservation.read_bytes:
            self.link_bytes[reservation.read_from] += sign * reservation.read_bytes
            if not self.link_bytes[reservation.read_from]:
                del self.link_bytes[reservation.read_from]

    def add_tpot_slo(self, tpot_slo_s: float, sign: int) -> None:
        self.tpot_slos_s[tpot_slo_s] += sign
        if not self.tpot_slos_s[tpot_slo_s]:
            del self.tpot_slos_s[tpot_slo_s]

    def view(self, report: WorkerReport) -> WorkerView:
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
    """The reports and reservations of all workers. Owned by the scheduler's event loop; never blocks.

    A reservation stands for a placement that the worker's reports do not contain yet. It ends when a report
    counts its decision, or `reservation_s` after it was made, because the gateway may never have sent the
    job. The TPOT SLO of a placed request counts until the request has ended.

    The worker table is updated with each report, so that a snapshot takes microseconds. Workers whose
    reservations have changed are only marked in `_stale` and updated together, because usually several have
    changed by then.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        reservation_s: float,
        max_reservations: int = MAX_RESERVATIONS,
        max_tpot_slos: int = MAX_TPOT_SLOS,
        awake_clock: Callable[[], float] | None = None,
    ) -> None:
        """Create an empty state.

        silence_s: a worker that has not reported for this time is removed.
        awake_clock: clock for that time, see `AwakeClock`; None uses the time that callers pass.
        """
        self._awake_clock = awake_clock
        self._silence_s = silence_s
        self._reservation_s = reservation_s
        self._max_reservations = max_reservations
        self._max_tpot_slos = max_tpot_slos
        self._reports: dict[str, WorkerReport] = {}
        self._received_s: dict[str, float] = {}
        self._no_silence_until_s = inf
        self._reservations: OrderedDict[tuple[DecisionId, str], _Reservation] = OrderedDict()
        self._tpot_slos: OrderedDict[DecisionId, tuple[WorkerRef, float, float]] = OrderedDict()
        self._reserved: dict[str, _ReservedTotals] = {}
        self._table_builder = WorkerTableBuilder()
        self._stale: set[str] = set()

    def update(self, report: WorkerReport, now_s: float) -> bool:
        """Store a report. Returns False if a newer one of the same epoch is known, as streams may cross."""
        worker_id = report.worker.worker_id
        known = self._reports.get(worker_id)
        is_new = known is None or not known.worker.is_same_incarnation(report.worker)
        if known is not None:
            if is_new:
                self._forget_placements(known.worker)
            elif known.report_seq >= report.report_seq:
                return False
        self._reports[worker_id] = report
        received_s = now_s if self._awake_clock is None else self._awake_clock()
        self._received_s[worker_id] = received_s
        self._no_silence_until_s = min(self._no_silence_until_s, received_s + self._silence_s)
        reserved = self._reserved.setdefault(worker_id, _ReservedTotals())
        for decision_id in report.counted_decision_ids:
            counted = self._reservations.pop((decision_id, worker_id), None)
            if counted is not None:
                reserved.add(counted, -1)
        if is_new:
            self._rebuild_table()
        else:
            self._update_table(worker_id)
        return True

    def remove(self, worker: WorkerRef) -> bool:
        """Remove a worker whose report stream has ended.

        Returns False if another epoch has taken its place.
        """
        known = self._reports.get(worker.worker_id)
        if known is None or not known.worker.is_same_incarnation(worker):
            return False
        del self._reports[worker.worker_id], self._received_s[worker.worker_id]
        self._forget_placements(worker)
        self._rebuild_table()
        return True

    def report_of(self, worker: WorkerRef) -> WorkerReport | None:
        """Return the last report of the worker with this id, of whatever epoch."""
        return self._reports.get(worker.worker_id)

    def reserve(self, decision_id: DecisionId, query: PlacementQuery, placement: Placement, now_s: float) -> None:
        """Count a placement on its workers until their reports count it."""
        for worker in (placement.prefill, placement.decode):
            report = self._reports.get(worker.worker_id) if worker is not None else None
            if worker is None or report is None:
                continue
            self._end_reservation((decision_id, worker.worker_id))
            reservation = _reservation(
                report,
                query,
                placement,
                is_prefill=worker is placement.prefill,
                expires_s=now_s + self._reservation_s,
            )
            self._reservations[(decision_id, worker.worker_id)] = reservation
            reserved = self._reserved[worker.worker_id]
            reserved.add(reservation, 1)
            if worker is placement.decode and query.slo.tpot_s is not None:
                self._tpot_slos[decision_id] = (report.worker, query.slo.tpot_s, now_s + query.deadline_s)
                reserved.add_tpot_slo(query.slo.tpot_s, 1)
            self._stale.add(worker.worker_id)
        while len(self._reservations) > self._max_reservations:
            self._end_reservation(next(iter(self._reservations)))
        while len(self._tpot_slos) > self._max_tpot_slos:
            self._end_tpot_slo(next(iter(self._tpot_slos)))

    def release(self, decision_id: DecisionId, worker_ids: tuple[str, ...]) -> None:
        """End everything that a placement has reserved on these workers, because its request has ended."""
        for worker_id in worker_ids:
            self._end_reservation((decision_id, worker_id))
        self._end_tpot_slo(decision_id)

    def snapshot(self, now_s: float, overlaps: Mapping[str, Overlap] = NO_OVERLAPS) -> ClusterSnapshot:
        """Return the workers that have reported within `silence_s`, sorted by id, reservations included.

        `overlaps`: see `ClusterSnapshot`.
        """
        self._expire(now_s)
        self.update_stale()
        table = self._table_builder.table()
        snapshot = ClusterSnapshot(workers=table.views, overlaps=overlaps)
        table.attach_to(snapshot)
        return snapshot

    def update_stale(self) -> None:
        """Update the table for changed reservations now, so that the next snapshot need not."""
        while self._stale:
            self._update_table(self._stale.pop())

    @property
    def has_reservations(self) -> bool:
        """True if placements are counted that no report contains yet, or if their sums say so."""
        return bool(self._reservations) or any(
            total.seqs or total.prefill_tokens or total.context_tokens or total.blocks or total.link_bytes
            for total in self._reserved.values()
        )

    @property
    def num_prefilling(self) -> int:
        """Number of ready workers whose role includes prefill."""
        return sum(r.state is WorkerState.READY and r.role.can_prefill for r in self._reports.values())

    def reports(self) -> tuple[WorkerReport, ...]:
        """Return the last reports, sorted by worker id."""
        return tuple(report for _, report in sorted(self._reports.items()))

    def _expire(self, now_s: float) -> None:
        awake_s = now_s if self._awake_clock is None else self._awake_clock()
        if awake_s > self._no_silence_until_s:
            silent = [worker_id for worker_id, at_s in self._received_s.items() if awake_s - at_s > self._silence_s]
            for worker_id in silent:
                self.remove(self._reports[worker_id].worker)
            self._no_silence_until_s = min(self._received_s.values(), default=inf) + self._silence_s
        while self._reservations:
            key, oldest = next(iter(self._reservations.items()))
            if oldest.expires_s > now_s:
                break
            self._end_reservation(key)
        while self._tpot_slos:
            decision_id, (_, _, expires_s) = next(iter(self._tpot_slos.items()))
            if expires_s > now_s:
                break
            self._end_tpot_slo(decision_id)

    def _end_reservation(self, key: tuple[DecisionId, str]) -> None:
        ended = self._reservations.pop(key, None)
        if ended is not None:
            self._reserved[ended.worker.worker_id].add(ended, -1)
            self._stale.add(ended.worker.worker_id)

    def _end_tpot_slo(self, decision_id: DecisionId) -> None:
        ended = self._tpot_slos.pop(decision_id, None)
        if ended is not None:
            worker, tpot_slo_s, _ = ended
            self._reserved[worker.worker_id].add_tpot_slo(tpot_slo_s, -1)
            self._stale.add(worker.worker_id)

    def _update_table(self, worker_id: str) -> None:
        self._stale.discard(worker_id)
        self._table_builder.update(self._reserved[worker_id].view(self._reports[worker_id]))

    def _forget_placements(self, worker: WorkerRef) -> None:
        """Drop all that was placed on a worker epoch that has ended."""
        for key in [key for key, r in self._reservations.items() if r.worker.is_same_incarnation(worker)]:
            del self._reservations[key]
        for decision_id in [
            decision_id for decision_id, (at, _, _) in self._tpot_slos.items() if at.is_same_incarnation(worker)
        ]:
            del self._tpot_slos[decision_id]
        self._reserved.pop(worker.worker_id, None)

    def _rebuild_table(self) -> None:
        self._stale.clear()
        self._table_builder.rebuild(
            [self._reserved[worker_id].view(report) for worker_id, report in sorted(self._reports.items())]
        )


def _reservation(
    report: WorkerReport, query: PlacementQuery, placement: Placement, *, is_prefill: bool, expires_s: float
) -> _Reservation:
    """Return what a placement takes on one of its workers. `report`: of that worker."""
    layout, num_tokens = report.layout, query.num_prompt_tokens
    cached_blocks = placement.prefill_overlap_blocks if is_prefill else placement.decode_overlap_blocks
    # The cached ones exist, or are reserved by the request that brings them.
    new_blocks = WorkerView(report=report).num_blocks_for(num_tokens) - layout.num_cached_blocks(cached_blocks)
    read_from, missing_blocks = "", 0
    if not is_prefill and placement.prefill is not None:
        read_from = placement.prefill.worker_id
        missing_blocks = layout.windows.num_held_blocks(num_tokens) - layout.num_cached_blocks(cached_blocks)
    elif placement.prefix_source is not None:
        read_from, num_blocks = placement.prefix_source.worker.worker_id, placement.prefix_source.num_blocks
        prefix_blocks = layout.windows.num_held_blocks(num_blocks * layout.block_size_tokens)
        missing_blocks = prefix_blocks - layout.num_cached_blocks(cached_blocks)
        cached_blocks = max(cached_blocks, num_blocks)
    computes = is_prefill or placement.prefill is None
    cached_tokens = min(num_tokens, cached_blocks * layout.block_size_tokens)
    new_tokens = num_tokens - cached_tokens if computes else 0
    return _Reservation(
        worker=report.worker,
        seqs=1 if is_prefill else query.sample_count,
        prefill_tokens=new_tokens,
        attended_tokens=attended_tokens(new_tokens, cached_tokens),
        context_tokens=0 if is_prefill else query.num_prompt_tokens * query.sample_count,
        blocks=max(0, new_blocks),
        read_from=read_from,
        read_bytes=max(0, missing_blocks) * layout.block_bytes,
        expires_s=expires_s,
    )
