"""The numbers of all workers side by side, so that a decision over a hundred of them is a few operations on
arrays.

Nothing here is known that a `ClusterSnapshot` does not say: `worker_table_of` makes the columns of any
snapshot, and `WorkerTableBuilder` keeps them up to date between snapshots, because making them takes longer
than deciding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.worker_report import LinkReport, WorkerState
from baton.core.kv.kv_layout import KvLayout
from baton.core.step_cost import stall_free_step_s

Floats: TypeAlias = npt.NDArray[np.float64]
"""One number a worker, in the order of their ids, where nothing else is said."""
Mask: TypeAlias = npt.NDArray[np.bool_]

DEFAULT_LINK_BYTES_PER_S = 1e9
"""Of a pair that has not been measured yet."""
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_OUTPUT_TOKENS = 128
"""Expected where no answer has ended yet."""

_COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Workers of one kind serve one model in one layout: they can read each other's blocks."""

    model: str
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Links:
    """How workers read from each other; all arrays are [reader, source]. `queued_s`: what is being read, or
    will be by own placements. `is_broken`: a read was given up and no probe has succeeded since. `is_warm`:
    the pair is set up with this life of the source."""

    s_per_byte: Floats
    queued_s: Floats
    is_broken: Mask
    is_warm: Mask


N = TypeVar("N", Floats, float)


class Rows(Generic[N]):
    """One array a quantity, one element a worker.

    `max_prefill_tokens`, `max_decode_tokens`: prompts under so many tokens could be prefilled or decoded
    there, had the worker nothing else to do; 0 if it is not ready, or that is not its role. `free_seqs`:
    places in its batch. `decoding_*`: of the running sequences, those that take part in every step (none at a
    prefill worker, whose sequences leave with their first token). `joining_*`: placed there and not running
    yet; where it is not known, their context is the mean of those that decode, and `joining_alike` of them
    have that of the prompt at hand, because nothing decodes. `decoding_s`: what the decoding ones add to a
    step. `link_s_per_byte`: of a source not read from yet. `step_s`, `token_s`, `attended_s`: corrected costs
    of the steps that a prompt would get there, be they mixed or not; `decode_*_s`: of steps without prefill;
    `beside_by_alone`: how much further the first are from what was measured. `has_costs`: 1 where they are
    the worker's own, 0.5 where they are borrowed, 0 where there are none. `chunk_tokens`: of a prompt in one
    step, at most. `slo_step_s`: the next step may take so long, for the promises to those that decode; 0
    where they allow nothing. They can spare it once, and each step of a queue is taken to have it: with
    little to spare beside a long queue the prediction is too early.

    Seconds that are the same for every prompt: `beside_s` of a step that computes nothing of it; `compute_s`
    of the prompts that wait, without these; `share_s` that prompts get of a step, so that those that decode
    or will join do not wait for long (`core.step_cost.stall_free_step_s`), infinite where there are none;
    `relax_s`, the time of a step of those, where prompts that take long get more than that, 0 where nobody
    decodes; `leave_s`, in how long all but 1/e of the sequences that decode there will have ended (an
    answer's age says little about what is left of it, so each is expected to go on for a whole mean length);
    `queue_s` until the prompts that wait there now, own placements included, are computed.
    """

    # As reported.
    kind: N
    is_ready: N
    can_prefill: N
    block_tokens: N
    block_bytes: N
    total_blocks: N
    max_prefill_tokens: N
    max_decode_tokens: N
    decoding_seqs: N
    decoding_context: N
    joining_alike: N
    chunk_tokens: N
    slo_step_s: N
    max_num_seqs: N
    output_tokens: N
    link_s_per_byte: N
    has_costs: N
    decoding_s: N
    step_s: N
    token_s: N
    attended_s: N
    decode_step_s: N
    decode_seq_s: N
    decode_context_s: N
    beside_by_alone: N
    # With own reservations.
    free_blocks: N
    free_tokens: N
    free_seqs: N
    joining_seqs: N
    joining_context: N
    queued_tokens: N
    queued_attended: N
    # Worked out from these.
    beside_s: N
    compute_s: N
    share_s: N
    relax_s: N
    leave_s: N
    queue_s: N


ROWS = tuple(Rows.__annotations__)
_COSTS = slice(ROWS.index("step_s"), ROWS.index("beside_by_alone") + 1)
_HAS_COSTS = ROWS.index("has_costs")
_LINK = ROWS.index("link_s_per_byte")
_RESERVED = slice(ROWS.index("free_blocks"), None)
_SECONDS = slice(ROWS.index("beside_s"), None)
_TINY_S = 1e-9
"""Below any step: keeps a worker whose costs are 0 from a division by 0."""


class Row(Rows[float]):
    """One worker's numbers, the first of them or all. Arithmetic with them takes a tenth of what it takes
    with elements of arrays."""

    def __init__(self, numbers: Sequence[float]) -> None:
        vars(self).update(zip(ROWS, numbers, strict=False))


class WorkerTable(Rows[Floats]):
    """`views` in the order of the columns; `kinds[i]` is what `kind == i` stands for; `numbers` [len(ROWS),
    num_workers] holds all rows."""

    def __init__(
        self,
        views: tuple[WorkerView, ...],
        index: Mapping[str, int],
        kinds: Sequence[WorkerKind],
        numbers: Floats,
        links: "_LinkTable",
    ) -> None:
        self.views, self.index, self.kinds, self.numbers = views, index, kinds, numbers
        self._table, self._version = links, links.version
        vars(self).update(zip(ROWS, numbers, strict=True))

    def row(self, i: int) -> Row:
        return Row(self.numbers[:, i].tolist())

    @property
    def links(self) -> Links:
        """Those of `views`. The keeper's own arrays while they still are, which they are when a decision
        follows its snapshot."""
        if self._table.version != self._version:
            self._table = _LinkTable(self.views, self.index)
            self._version = self._table.version
        return self._table.links

    @property
    def all_measured(self) -> bool:
        """Whether every worker's costs are its own."""
        return bool(np.count_nonzero(self.has_costs == 1) == len(self.views))

    def with_costs_borrowed(self) -> "WorkerTable":
        """Workers that have not measured themselves yet are taken for the median of those of their kind that
        have, where there are any."""
        measured = self.has_costs > 0
        numbers = self.numbers.copy()
        for kind in range(len(self.kinds)):
            of_kind = self.kind == kind
            lenders, borrowers = np.flatnonzero(of_kind & measured), np.flatnonzero(of_kind & ~measured)
            if len(lenders) and len(borrowers):
                numbers[_COSTS, borrowers] = np.median(numbers[_COSTS, lenders], axis=1, keepdims=True)
                numbers[_HAS_COSTS, borrowers] = 0.5
                for i in borrowers:
                    numbers[:, i] = _with_seconds(numbers[: _SECONDS.start, i].tolist())
        lent = WorkerTable(self.views, self.index, self.kinds, numbers, self._table)
        lent._version = self._version
        return lent

    def derive_into(self, cluster: ClusterSnapshot) -> None:
        """`cluster` has these very `views`: `worker_table_of` need not make them again."""
        cluster.derived[_COLUMNS] = self


def worker_table_of(cluster: ClusterSnapshot) -> WorkerTable:
    """Made once a snapshot, unless it came with them."""
    known = cluster.derived.get(_COLUMNS)
    if isinstance(known, WorkerTable):
        return known
    keeper = WorkerTableBuilder()
    keeper.rebuild(cluster.workers)
    columns = keeper.columns()
    columns.derive_into(cluster)
    return columns


class WorkerTableBuilder:
    """The columns of one view, kept up to date. Single owner: the scheduler's event loop."""

    def __init__(self) -> None:
        self.rebuild(())

    def rebuild(self, views: Sequence[WorkerView]) -> None:
        """Other workers than before, sorted by id. A millisecond for a hundred: only when one comes, goes or
        is reborn."""
        self._views = list(views)
        self._index = {view.worker_id: i for i, view in enumerate(views)}
        self._kinds: dict[WorkerKind, int] = {}
        self._numbers = np.zeros((len(ROWS), len(views)))
        for i, view in enumerate(views):
            self._numbers[:, i] = _with_seconds(
                self._reported(view, _expected_s_per_byte(view.report.links)) + _reserved(view)
            )
        self._links = _LinkTable(views, self._index)

    def update(self, view: WorkerView) -> None:
        """A newer view of a life that is known. Where only reservations have changed, which happens with each
        placement, only what they change is worked out again."""
        i = self._index[view.worker_id]
        before = self._views[i]
        column = self._numbers[:, i]
        if view.report is before.report:
            column[_RESERVED] = _with_seconds(column[: _RESERVED.start].tolist() + _reserved(view))[_RESERVED]
        else:
            same_links = view.report.links is before.report.links
            link_s_per_byte = column[_LINK] if same_links else _expected_s_per_byte(view.report.links)
            column[:] = _with_seconds(self._reported(view, link_s_per_byte) + _reserved(view))
        self._links.update(i, view, before)
        self._views[i] = view

    def columns(self) -> WorkerTable:
        """As they are now; later updates do not change them."""
        return WorkerTable(tuple(self._views), self._index, tuple(self._kinds), self._numbers.copy(), self._links)

    def _reported(self, view: WorkerView, link_s_per_byte: float) -> list[float]:
        """The first of `ROWS`, those that reservations do not change."""
        report = view.report
        costs = report.costs if report.costs is not None and report.costs.is_usable else None
        is_ready, role, layout = report.state is WorkerState.READY, report.role, report.layout
        max_tokens = report.blocks.total * layout.block_size_tokens if is_ready else 0
        decoding_seqs = report.running_seqs if role.can_decode else 0
        decoding_context = report.running_context_tokens if role.can_decode else 0
        output_tokens = (
            report.mean_output_tokens if 1 <= report.mean_output_tokens < float("inf") else DEFAULT_OUTPUT_TOKENS
        )
        numbers: list[float] = [
            self._kinds.setdefault(WorkerKind(report.model, layout), len(self._kinds)),
            is_ready,
            role.can_prefill,
            layout.block_size_tokens,
            layout.block_bytes,
            report.blocks.total,
            max_tokens if role.can_prefill else 0,
            max_tokens if role.can_decode else 0,
            decoding_seqs,
            decoding_context,
            0 if decoding_seqs else report.waiting_seqs,
            max(1, (report.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS) - decoding_seqs),
            report.slo_step_s,
            report.max_num_seqs,
            output_tokens,
            link_s_per_byte,
            costs is not None,
        ]
        if costs is None:
            return [*numbers, *[0.0] * 8]
        prefill, decode = costs.mixed_factor if decoding_seqs else costs.prefill_factor, costs.decode_factor
        decoding_s = (costs.decode_seq_s * decoding_seqs + costs.decode_context_s * decoding_context) * prefill
        numbers += [
            decoding_s,
            costs.step_s * prefill,
            costs.prefill_token_s * prefill,
            costs.prefill_attended_s * prefill,
        ]
        numbers += [
            costs.step_s * decode,
            costs.decode_seq_s * decode,
            costs.decode_context_s * decode,
            prefill / decode,
        ]
        return numbers


def _reserved(view: WorkerView) -> list[float]:
    """The rows after those of `_reported`."""
    report, free_blocks = view.report, view.num_free_blocks
    waiting_attended = report.waiting_prefill_attended_tokens or report.waiting_prefill_tokens**2 / (
        2 * max(1, report.waiting_seqs)
    )
    decodes = report.role.can_decode and report.running_seqs > 0
    mean_context = report.running_context_tokens / report.running_seqs if decodes else 0.0
    return [
        free_blocks,
        free_blocks * report.layout.block_size_tokens,
        report.max_num_seqs - view.num_seqs,
        report.waiting_seqs + view.reserved_seqs,
        view.reserved_context_tokens + report.waiting_seqs * mean_context,
        view.queued_prefill_tokens,
        waiting_attended + view.reserved_attended_tokens,
    ]


def _with_seconds(numbers: list[float]) -> list[float]:
    """All of `ROWS`, from all but those that are worked out."""
    row = Row(numbers)
    beside_s = row.step_s + row.decoding_s
    decode_s = row.decode_step_s + row.decode_seq_s * row.decoding_seqs + row.decode_context_s * row.decoding_context
    leave_s = row.output_tokens * max(decode_s, _TINY_S)
    compute_s = row.token_s * row.queued_tokens + row.attended_s * row.queued_attended
    share_s, relax_s = _share_s(row, compute_s)
    num_steps = ceil(max(row.queued_tokens / row.chunk_tokens, compute_s / share_s))
    return [*numbers, beside_s, compute_s, share_s, relax_s, leave_s, num_steps * beside_s + compute_s]


def _share_s(row: Row, queued_s: float) -> tuple[float, float]:
    """(`share_s`, `relax_s`). The engine knows how many prompts wait and how many sequences decode; here
    those that have no place yet stand for the first, those pulled among them, and those that have one for the
    second."""
    seqs = row.decoding_seqs + row.joining_seqs if row.max_decode_tokens else 0
    if not seqs or not row.token_s:
        return inf, 0.0
    decode_s = (
        row.decode_step_s
        + row.decode_seq_s * seqs
        + row.decode_context_s * (row.decoding_context + row.joining_context)
    )
    beside_s = decode_s * row.beside_by_alone
    share_s = (
        stall_free_step_s(decode_s, beside_s, row.slo_step_s, queued_s, row.joining_seqs, row.decoding_seqs) - beside_s
    )
    return max(share_s, row.block_tokens * row.token_s), beside_s


class _LinkTable:
    """`Links` that change in place, and a version that tells when they have."""

    def __init__(self, views: Sequence[WorkerView], index: Mapping[str, int]) -> None:
        size = len(views)
        self.version = 0
        shape = (size, size)
        self.links = Links(np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool))
        self._reported_s = np.zeros(shape)
        self._index = index
        self._lives = [view.worker for view in views]
        for i, view in enumerate(views):
            self._fill(i, view)

    def update(self, i: int, view: WorkerView, before: WorkerView) -> None:
        same_links = view.report.links is before.report.links or not (view.report.links or before.report.links)
        if same_links and view.reserved_link_bytes == before.reserved_link_bytes:
            return
        self.version += 1
        if same_links:
            self._reserve(i, dict.fromkeys(before.reserved_link_bytes, 0) | dict(view.reserved_link_bytes))
        else:
            self._fill(i, view)

    def _fill(self, i: int, view: WorkerView) -> None:
        links = self.links
        links.s_per_byte[i] = _expected_s_per_byte(view.report.links)
        self._reported_s[i] = 0.0
        links.is_broken[i] = links.is_warm[i] = False
        known = [
            (self._index[link.peer.worker_id], link) for link in view.report.links if link.peer.worker_id in self._index
        ]
        if known:
            at = [j for j, _ in known]
            links.s_per_byte[i, at] = s_per_byte = [_s_per_byte(link) for _, link in known]
            self._reported_s[i, at] = [
                link.inflight_bytes * each for (_, link), each in zip(known, s_per_byte, strict=True)
            ]
            links.is_broken[i, at] = [link.broken for _, link in known]
            links.is_warm[i, at] = [
                not link.broken and link.peer.is_same_incarnation(self._lives[j]) for j, link in known
            ]
        links.queued_s[i] = self._reported_s[i]
        self._reserve(i, view.reserved_link_bytes)

    def _reserve(self, i: int, num_bytes: Mapping[str, int]) -> None:
        for peer, more in num_bytes.items():
            j = self._index.get(peer)
            if j is not None:
                self.links.queued_s[i, j] = self._reported_s[i, j] + more * self.links.s_per_byte[i, j]


def _s_per_byte(link: LinkReport) -> float:
    return 1 / link.bytes_per_s if link.bytes_per_s > 0 and isfinite(link.bytes_per_s) else 1 / DEFAULT_LINK_BYTES_PER_S


def fastest(links: Sequence[LinkReport]) -> LinkReport | None:
    """Of those that were measured and work: what a worker can expect of a source that it has not read from
    yet."""
    known = [link for link in links if not link.broken and link.bytes_per_s > 0 and isfinite(link.bytes_per_s)]
    return max(known, key=lambda link: link.bytes_per_s, default=None)


def _expected_s_per_byte(links: Sequence[LinkReport]) -> float:
    link = fastest(links)
    return 1 / DEFAULT_LINK_BYTES_PER_S if link is None else 1 / link.bytes_per_s
