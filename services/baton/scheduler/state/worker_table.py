"""Holds the numbers of all workers in arrays, one element per worker, for vectorised decisions.

The table contains nothing that the `ClusterSnapshot` does not: `worker_table_of` can build it from any
snapshot. The scheduler keeps one `WorkerTableBuilder` up to date instead, because building a table takes
longer than deciding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.kv.kv_layout import KvLayout
from baton.scheduler.state.worker_data import (
    MEASURED_COSTS,
    NO_COSTS,
    PEER_COSTS,
    DerivedState,
    Floats,
    ReportedState,
    ReservedState,
    WorkerData,
    WorkerRow,
)
from baton.scheduler.state.worker_links import LinkArrays, Links, expected_link
from baton.scheduler.state.worker_row import derived_state, reported_state, reserved_state

_CACHE_KEY = "worker_table"

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
class KvGroup:
    """Workers that serve one model with one KV layout, and can therefore read each other's blocks."""

    model: str
    layout: KvLayout


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
        links: LinkArrays,
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
            self._link_arrays = LinkArrays(self.views, self.index)
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
        self._expected_links = [expected_link(view.report.links) for view in views]
        for i, view in enumerate(views):
            self._reported.append(reported_state(view, self._kv_group_of(view), self._expected_links[i]))
            _write(self._numbers, i, self._reported[i], reserved_state(view))
        self._links = LinkArrays(views, self._index)

    def update(self, view: WorkerView) -> None:
        """Take over a newer view of a worker whose epoch is known.

        If only reservations have changed, as after each placement, only their consequences are computed
        again.
        """
        i = self._index[view.worker_id]
        before = self._views[i]
        same_links = view.report.links == before.report.links
        if view.report is before.report:
            reserved = reserved_state(view)
            derived = derived_state(self._reported[i], reserved)
            self._numbers[_NUM_REPORTED:, i] = _reserved_values(reserved) + _derived_values(derived)
        else:
            if not same_links:
                self._expected_links[i] = expected_link(view.report.links)
            same_group = (view.report.model, view.report.layout) == (before.report.model, before.report.layout)
            kv_group = int(self._reported[i].kv_group) if same_group else self._kv_group_of(view)
            self._reported[i] = reported_state(view, kv_group, self._expected_links[i])
            _write(self._numbers, i, self._reported[i], reserved_state(view))
        self._links.update(i, view, before, same_links=same_links)
        self._views[i] = view

    def table(self) -> WorkerTable:
        """Return the current numbers. Later updates do not change them."""
        return WorkerTable(tuple(self._views), self._index, tuple(self._kv_groups), self._numbers.copy(), self._links)

    def _kv_group_of(self, view: WorkerView) -> int:
        return self._kv_groups.setdefault(KvGroup(view.report.model, view.report.layout), len(self._kv_groups))


def _write(numbers: Floats, i: int, reported: ReportedState[float], reserved: ReservedState[float]) -> None:
    """Write one worker's numbers, the derived ones included, into the backing array [fields, workers]."""
    derived = derived_state(reported, reserved)
    numbers[:, i] = _reported_values(reported) + _reserved_values(reserved) + _derived_values(derived)
