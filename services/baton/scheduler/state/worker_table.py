"""Holds the numbers of all workers in arrays, one element per worker, for vectorised decisions.

The table contains nothing that the `ClusterSnapshot` does not: `worker_table_of` can build it from any
snapshot. The scheduler keeps one `WorkerTableBuilder` up to date instead, because building a table takes
longer than deciding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, inf, isfinite
from operator import attrgetter
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.worker_report import LinkReport, WorkerState
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import stall_free_step_s

Floats: TypeAlias = npt.NDArray[np.float64]
"""One number per worker, sorted by worker id, unless stated otherwise."""
Mask: TypeAlias = npt.NDArray[np.bool_]
"""One truth value per worker, sorted by worker id."""

DEFAULT_LINK_BYTES_PER_S = 1e9
"""Assumed bandwidth of a pair of workers that was never measured."""
DEFAULT_CHUNK_TOKENS = 512
"""Assumed `max_num_batched_tokens` of a worker that does not report it."""
DEFAULT_OUTPUT_TOKENS = 128
"""Assumed mean answer length of a worker where no sequence has ended yet."""

NO_COSTS, PEER_COSTS, MEASURED_COSTS = 0.0, 0.5, 1.0
"""Values of `ReportedState.cost_source`."""

_CACHE_KEY = "worker_table"
_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""

N = TypeVar("N", Floats, float)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Workers that serve one model with one KV layout, and can therefore read each other's blocks."""

    model: str
    layout: KvLayout


@dataclass(slots=True)
class ReportedState(Generic[N]):
    """Numbers taken from the workers' reports alone.

    Never changed after construction, like the next two classes.

    They are not `frozen`, because that would make their construction, twice per decision, three times as
    slow. The step costs are corrected by the live factors of the step kind that a prompt would meet at the
    worker: mixed if sequences decode there, prefill otherwise.
    """

    kv_group: N  # index into `WorkerTable.kv_groups`
    is_ready: N  # 1 or 0
    can_prefill: N  # 1 or 0, by role
    block_size_tokens: N
    block_bytes: N
    total_blocks: N
    max_prefill_tokens: N  # prompts must be shorter than this to be prefilled here; 0 if not ready or by role
    max_decode_tokens: N  # the same for decoding
    decoding_seqs: N  # running sequences that decode; 0 on prefill workers, where they end with the first token
    decoding_context_tokens: N  # sum of their contexts
    joining_seqs_unknown: N  # waiting sequences of unknown length: assumed to be as long as the new prompt
    max_chunk_tokens: N  # largest chunk of a prompt in one step
    slo_step_s: N  # longest next step that the running requests' TPOT SLOs allow; 0 if they allow nothing
    max_num_seqs: N
    mean_output_tokens: N
    default_link_s_per_byte: N  # expected for a peer that was never read from
    cost_source: N  # `NO_COSTS`, `PEER_COSTS` (estimated from other workers) or `MEASURED_COSTS`
    mixed_decode_s: N  # time that the decoding sequences add to a mixed step
    base_step_s: N  # fixed time of a step with prefill
    prefill_token_s: N
    prefill_attended_s: N
    decode_step_s: N  # fixed time of a step without prefill
    decode_seq_s: N
    decode_context_s: N
    mixed_to_decode_ratio: N  # correction factor of mixed steps over that of decode steps


@dataclass(slots=True)
class ReservedState(Generic[N]):
    """Numbers from the reports plus this scheduler's own placements that no report contains yet."""

    free_blocks: N
    free_tokens: N  # the same in tokens
    free_seqs: N  # free batch slots
    joining_seqs: N  # sequences placed here that do not run yet
    joining_context_tokens: N  # sum of their contexts; reported ones count with the mean of the decoding ones
    queued_tokens: N  # prompt tokens waiting for prefill
    queued_attended_tokens: N  # (query, context) pairs of these tokens


@dataclass(slots=True)
class DerivedState(Generic[N]):
    """Predicted seconds that are the same for every new prompt."""

    mixed_step_s: N  # a step that decodes but computes nothing of the new prompt
    queued_prefill_s: N  # prefill compute of all queued prompts, without the decode part of those steps
    prefill_share_s: N  # prefill compute in one mixed step (`core.step_cost.stall_free_step_s`); inf if none decode
    joined_step_s: N  # decode part of a mixed step once the joining sequences decode; 0 if there are none
    drain_s: N  # time in which all but 1/e of the decoding sequences end
    queue_s: N  # time until all queued prompts are computed


@dataclass(slots=True)
class WorkerData(Generic[N]):
    """All numbers of one worker (`WorkerData[float]`) or of all workers (`WorkerTable`).

    Scalars exist because numpy takes ten times as long as Python for a single number.
    """

    reported: ReportedState[N]
    reserved: ReservedState[N]
    derived: DerivedState[N]


WorkerRow: TypeAlias = WorkerData[float]

_REPORTED_NAMES = tuple(field.name for field in fields(ReportedState))
_RESERVED_NAMES = tuple(field.name for field in fields(ReservedState))
_DERIVED_NAMES = tuple(field.name for field in fields(DerivedState))
_NUM_REPORTED = len(_REPORTED_NAMES)
_NUM_STATE = _NUM_REPORTED + len(_RESERVED_NAMES)
_NUM_FIELDS = _NUM_STATE + len(_DERIVED_NAMES)
_reported_values = attrgetter(*_REPORTED_NAMES)
_reserved_values = attrgetter(*_RESERVED_NAMES)
_derived_values = attrgetter(*_DERIVED_NAMES)

PEER_COST_NAMES = (
    "base_step_s",
    "prefill_token_s",
    "prefill_attended_s",
    "decode_step_s",
    "decode_seq_s",
    "decode_context_s",
    "mixed_to_decode_ratio",
)
"""The fields of `ReportedState` that are estimated from peers while a worker has not measured itself."""


@dataclass(frozen=True, slots=True)
class Links:
    """The speed and state of the links between workers. All arrays are [reader, source]."""

    s_per_byte: Floats
    queued_s: Floats  # time for the reads under way plus those of own placements
    is_broken: Mask  # a read was given up and no probe has succeeded since
    is_warm: Mask  # the pair is connected with the source's current epoch


class WorkerTable(WorkerData[Floats]):
    """The numbers of all workers at one moment. Later updates of the builder do not change them.

    views: the workers, sorted by id; element i of each array belongs to views[i].
    index: position by worker id.
    kv_groups: the meaning of the values of `reported.kv_group`.
    """

    __slots__ = ("_link_arrays", "_link_version", "_numbers", "_rows", "index", "kv_groups", "views")

    def __init__(
        self,
        views: tuple[WorkerView, ...],
        index: Mapping[str, int],
        kv_groups: Sequence[KvGroup],
        numbers: Floats,
        links: "_LinkArrays",
        *,
        link_version: int | None = None,
    ) -> None:
        """`numbers` [fields, workers] is the backing array.

        `links` may change later, and then has a new version. `link_version` is the one that fits `views`, or
        None for the current one.
        """
        self.views, self.index, self.kv_groups = views, index, kv_groups
        self._numbers = numbers
        self._rows: dict[int, WorkerRow] = {}
        self._link_arrays = links
        self._link_version = links.version if link_version is None else link_version
        rows = tuple(numbers)
        self.reported = ReportedState(*rows[:_NUM_REPORTED])
        self.reserved = ReservedState(*rows[_NUM_REPORTED:_NUM_STATE])
        self.derived = DerivedState(*rows[_NUM_STATE:])

    def row(self, i: int) -> WorkerRow:
        """Return the numbers of one worker as Python floats."""
        row = self._rows.get(i)
        if row is None:
            values = self._numbers[:, i].tolist()
            row = self._rows[i] = WorkerData(
                ReportedState(*values[:_NUM_REPORTED]),
                ReservedState(*values[_NUM_REPORTED:_NUM_STATE]),
                DerivedState(*values[_NUM_STATE:]),
            )
        return row

    @property
    def links(self) -> Links:
        """The links of `views`.

        Shares the builder's arrays while these are unchanged, as they are if a decision follows its snapshot.
        Otherwise they are built again from `views`.
        """
        if self._link_arrays.version != self._link_version:
            self._link_arrays = _LinkArrays(self.views, self.index)
            self._link_version = self._link_arrays.version
        return self._link_arrays.links

    @property
    def all_measured(self) -> bool:
        """True if every worker has reported step costs of its own."""
        return bool(np.count_nonzero(self.reported.cost_source == MEASURED_COSTS) == len(self.views))

    def with_peer_costs(self) -> "WorkerTable":
        """Return a table in which workers without step costs have the median costs of their KV group.

        A group in which no worker has measured itself stays without costs.
        """
        is_measured = self.reported.cost_source > NO_COSTS
        numbers = self._numbers.copy()
        for group in range(len(self.kv_groups)):
            in_group = self.reported.kv_group == group
            measured, unmeasured = np.flatnonzero(in_group & is_measured), np.flatnonzero(in_group & ~is_measured)
            if not len(measured):
                continue
            costs = {name: float(np.median(getattr(self.reported, name)[measured])) for name in PEER_COST_NAMES}
            for i in unmeasured.tolist():
                row = self.row(i)
                reported = replace(row.reported, cost_source=PEER_COSTS, **costs)
                _write(numbers, i, reported, row.reserved)
        return WorkerTable(
            self.views, self.index, self.kv_groups, numbers, self._link_arrays, link_version=self._link_version
        )

    def attach_to(self, cluster: ClusterSnapshot) -> None:
        """Let `worker_table_of(cluster)` return this table. `cluster` must have the same `views`."""
        cluster.derived[_CACHE_KEY] = self


def worker_table_of(cluster: ClusterSnapshot) -> WorkerTable:
    """Return the table of a snapshot. Builds it at the first call unless one is attached."""
    known = cluster.derived.get(_CACHE_KEY)
    if isinstance(known, WorkerTable):
        return known
    builder = WorkerTableBuilder()
    builder.rebuild(cluster.workers)
    table = builder.table()
    table.attach_to(cluster)
    return table


class WorkerTableBuilder:
    """Keeps the numbers of the current workers up to date. Owned by the scheduler's event loop."""

    def __init__(self) -> None:
        self.rebuild(())

    def rebuild(self, views: Sequence[WorkerView]) -> None:
        """Start again with `views`, sorted by id.

        Takes a millisecond per hundred workers, so it is for changes of the set of workers and of their
        epochs.
        """
        self._views = list(views)
        self._index = {view.worker_id: i for i, view in enumerate(views)}
        self._kv_groups: dict[KvGroup, int] = {}
        self._reported: list[ReportedState[float]] = []
        self._numbers = np.zeros((_NUM_FIELDS, len(views)))
        for i, view in enumerate(views):
            self._reported.append(self._reported_state(view, _best_s_per_byte(view.report.links)))
            _write(self._numbers, i, self._reported[i], reserved_state(view))
        self._links = _LinkArrays(views, self._index)

    def update(self, view: WorkerView) -> None:
        """Take over a newer view of a worker whose epoch is known.

        If only reservations have changed, as after each placement, only their consequences are computed
        again.
        """
        i = self._index[view.worker_id]
        before = self._views[i]
        if view.report is before.report:
            reserved = reserved_state(view)
            derived = derived_state(self._reported[i], reserved)
            self._numbers[_NUM_REPORTED:, i] = _reserved_values(reserved) + _derived_values(derived)
        else:
            same_links = view.report.links is before.report.links
            link_s_per_byte = (
                self._reported[i].default_link_s_per_byte if same_links else _best_s_per_byte(view.report.links)
            )
            self._reported[i] = self._reported_state(view, link_s_per_byte)
            _write(self._numbers, i, self._reported[i], reserved_state(view))
        self._links.update(i, view, before)
        self._views[i] = view

    def table(self) -> WorkerTable:
        """Return the current numbers. Later updates do not change them."""
        return WorkerTable(tuple(self._views), self._index, tuple(self._kv_groups), self._numbers.copy(), self._links)

    def _reported_state(self, view: WorkerView, link_s_per_byte: float) -> ReportedState[float]:
        report = view.report
        role, layout = report.role, report.layout
        is_ready = report.state is WorkerState.READY
        max_tokens = report.blocks.total * layout.block_size_tokens if is_ready else 0
        decoding_seqs = report.running_seqs if role.can_decode else 0
        decoding_context_tokens = report.running_context_tokens if role.can_decode else 0
        has_mean = 1 <= report.mean_output_tokens < inf
        costs = report.costs if report.costs is not None and report.costs.is_usable else None
        reported: ReportedState[float] = ReportedState(
            kv_group=self._kv_groups.setdefault(KvGroup(report.model, layout), len(self._kv_groups)),
            is_ready=is_ready,
            can_prefill=role.can_prefill,
            block_size_tokens=layout.block_size_tokens,
            block_bytes=layout.block_bytes,
            total_blocks=report.blocks.total,
            max_prefill_tokens=max_tokens if role.can_prefill else 0,
            max_decode_tokens=max_tokens if role.can_decode else 0,
            decoding_seqs=decoding_seqs,
            decoding_context_tokens=decoding_context_tokens,
            joining_seqs_unknown=0 if decoding_seqs else report.waiting_seqs,
            max_chunk_tokens=max(1, (report.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS) - decoding_seqs),
            slo_step_s=report.slo_step_s,
            max_num_seqs=report.max_num_seqs,
            mean_output_tokens=report.mean_output_tokens if has_mean else DEFAULT_OUTPUT_TOKENS,
            default_link_s_per_byte=link_s_per_byte,
            cost_source=NO_COSTS,
            mixed_decode_s=0.0,
            base_step_s=0.0,
            prefill_token_s=0.0,
            prefill_attended_s=0.0,
            decode_step_s=0.0,
            decode_seq_s=0.0,
            decode_context_s=0.0,
            mixed_to_decode_ratio=0.0,
        )
        if costs is None:
            return reported
        prefill_factor = costs.mixed_factor if decoding_seqs else costs.prefill_factor
        decode_s = costs.decode_seq_s * decoding_seqs + costs.decode_context_s * decoding_context_tokens
        return replace(
            reported,
            cost_source=MEASURED_COSTS,
            mixed_decode_s=decode_s * prefill_factor,
            base_step_s=costs.step_s * prefill_factor,
            prefill_token_s=costs.prefill_token_s * prefill_factor,
            prefill_attended_s=costs.prefill_attended_s * prefill_factor,
            decode_step_s=costs.step_s * costs.decode_factor,
            decode_seq_s=costs.decode_seq_s * costs.decode_factor,
            decode_context_s=costs.decode_context_s * costs.decode_factor,
            mixed_to_decode_ratio=prefill_factor / costs.decode_factor,
        )


def reserved_state(view: WorkerView) -> ReservedState[float]:
    """Return what a worker has left and what is queued there, own placements included."""
    report, free_blocks = view.report, view.num_free_blocks
    waiting_attended_tokens = report.waiting_prefill_attended_tokens or report.waiting_prefill_tokens**2 / (
        2 * max(1, report.waiting_seqs)
    )
    decodes = report.role.can_decode and report.running_seqs > 0
    mean_context_tokens = report.running_context_tokens / report.running_seqs if decodes else 0.0
    return ReservedState(
        free_blocks=free_blocks,
        free_tokens=free_blocks * report.layout.block_size_tokens,
        free_seqs=report.max_num_seqs - view.num_seqs,
        joining_seqs=report.waiting_seqs + view.reserved_seqs,
        joining_context_tokens=view.reserved_context_tokens + report.waiting_seqs * mean_context_tokens,
        queued_tokens=view.queued_prefill_tokens,
        queued_attended_tokens=waiting_attended_tokens + view.reserved_attended_tokens,
    )


def derived_state(reported: ReportedState[float], reserved: ReservedState[float]) -> DerivedState[float]:
    """Predict the seconds of `DerivedState` for one worker.

    `slo_step_s` is slack that exists only once, but the model applies it to every queued step. Long queues
    beside sequences with little slack are therefore predicted too early.

    The age of an answer says little about its remaining length, so each decoding sequence is expected to run
    for another whole mean answer (`drain_s`).
    """
    mixed_step_s = reported.base_step_s + reported.mixed_decode_s
    decode_s = (
        reported.decode_step_s
        + reported.decode_seq_s * reported.decoding_seqs
        + reported.decode_context_s * reported.decoding_context_tokens
    )
    queued_prefill_s = (
        reported.prefill_token_s * reserved.queued_tokens
        + reported.prefill_attended_s * reserved.queued_attended_tokens
    )
    prefill_share_s, joined_step_s = _prefill_share_s(reported, reserved, queued_prefill_s)
    num_steps = ceil(max(reserved.queued_tokens / reported.max_chunk_tokens, queued_prefill_s / prefill_share_s))
    return DerivedState(
        mixed_step_s=mixed_step_s,
        queued_prefill_s=queued_prefill_s,
        prefill_share_s=prefill_share_s,
        joined_step_s=joined_step_s,
        drain_s=reported.mean_output_tokens * max(decode_s, _TINY_S),
        queue_s=num_steps * mixed_step_s + queued_prefill_s,
    )


def _prefill_share_s(
    reported: ReportedState[float], reserved: ReservedState[float], queued_prefill_s: float
) -> tuple[float, float]:
    """Return (`prefill_share_s`, `joined_step_s`).

    The engine sizes its steps by the number of waiting prompts and of decoding sequences. Here the joining
    sequences, pulled ones included, stand for the former and the decoding ones for the latter.
    """
    seqs = reported.decoding_seqs + reserved.joining_seqs if reported.max_decode_tokens else 0
    if not seqs or not reported.prefill_token_s:
        return inf, 0.0
    decode_s = (
        reported.decode_step_s
        + reported.decode_seq_s * seqs
        + reported.decode_context_s * (reported.decoding_context_tokens + reserved.joining_context_tokens)
    )
    joined_step_s = decode_s * reported.mixed_to_decode_ratio
    step_s = stall_free_step_s(
        decode_s, joined_step_s, reported.slo_step_s, queued_prefill_s, reserved.joining_seqs, reported.decoding_seqs
    )
    return max(step_s - joined_step_s, reported.block_size_tokens * reported.prefill_token_s), joined_step_s


def _write(numbers: Floats, i: int, reported: ReportedState[float], reserved: ReservedState[float]) -> None:
    """Write one worker's numbers, the derived ones included, into the backing array [fields, workers]."""
    derived = derived_state(reported, reserved)
    numbers[:, i] = _reported_values(reported) + _reserved_values(reserved) + _derived_values(derived)


class _LinkArrays:
    """`Links` that are updated in place. `version` grows with each change."""

    def __init__(self, views: Sequence[WorkerView], index: Mapping[str, int]) -> None:
        shape = (len(views), len(views))
        self.version = 0
        self.links = Links(np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool))
        self._reported_s = np.zeros(shape)
        self._index = index
        self._workers = [view.worker for view in views]
        for i, view in enumerate(views):
            self._fill(i, view)

    def update(self, i: int, view: WorkerView, before: WorkerView) -> None:
        same_links = view.report.links is before.report.links or not (view.report.links or before.report.links)
        if same_links and view.reserved_link_bytes == before.reserved_link_bytes:
            return
        self.version += 1
        if same_links:
            self._add_reserved(i, dict.fromkeys(before.reserved_link_bytes, 0) | dict(view.reserved_link_bytes))
        else:
            self._fill(i, view)

    def _fill(self, i: int, view: WorkerView) -> None:
        links = self.links
        links.s_per_byte[i] = _best_s_per_byte(view.report.links)
        self._reported_s[i] = 0.0
        links.is_broken[i] = links.is_warm[i] = False
        known = [
            (self._index[link.peer.worker_id], link) for link in view.report.links if link.peer.worker_id in self._index
        ]
        if known:
            peers = [j for j, _ in known]
            links.s_per_byte[i, peers] = s_per_byte = [_s_per_byte(link) for _, link in known]
            self._reported_s[i, peers] = [
                link.inflight_bytes * each for (_, link), each in zip(known, s_per_byte, strict=True)
            ]
            links.is_broken[i, peers] = [link.broken for _, link in known]
            links.is_warm[i, peers] = [
                not link.broken and link.peer.is_same_incarnation(self._workers[j]) for j, link in known
            ]
        links.queued_s[i] = self._reported_s[i]
        self._add_reserved(i, view.reserved_link_bytes)

    def _add_reserved(self, i: int, num_bytes: Mapping[str, int]) -> None:
        for peer, reserved_bytes in num_bytes.items():
            j = self._index.get(peer)
            if j is not None:
                self.links.queued_s[i, j] = self._reported_s[i, j] + reserved_bytes * self.links.s_per_byte[i, j]


def _s_per_byte(link: LinkReport) -> float:
    return 1 / link.bytes_per_s if link.bytes_per_s > 0 and isfinite(link.bytes_per_s) else 1 / DEFAULT_LINK_BYTES_PER_S


def fastest_link(links: Sequence[LinkReport]) -> LinkReport | None:
    """Return the fastest working link that was measured, or None.

    Its bandwidth is expected of a peer that the worker has never read from.
    """
    known = [link for link in links if not link.broken and link.bytes_per_s > 0 and isfinite(link.bytes_per_s)]
    return max(known, key=lambda link: link.bytes_per_s, default=None)


def _best_s_per_byte(links: Sequence[LinkReport]) -> float:
    link = fastest_link(links)
    return 1 / DEFAULT_LINK_BYTES_PER_S if link is None else 1 / link.bytes_per_s
