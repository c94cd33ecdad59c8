"""Holds the speed and state of the links between all workers in arrays [reader, source]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.worker_report import LinkReport
from baton.core.ids import WorkerRef
from baton.scheduler.state.worker_data import Floats, Mask

DEFAULT_LINK_BYTES_PER_S = 1e9
"""Assumed bandwidth of a pair of workers that was never measured."""


@dataclass(frozen=True, slots=True)
class Links:
    """The speed and state of the links between workers. All arrays are [reader, source]."""

    s_per_byte: Floats
    queued_s: Floats  # time for the reads under way plus those of own placements
    is_broken: Mask  # a read was given up and no probe has succeeded since
    is_warm: Mask  # the pair is connected with the source's current epoch


class LinkArrays:
    """`Links` that are updated in place. `version` grows with each change."""

    def __init__(self, views: Sequence[WorkerView], index: Mapping[str, int]) -> None:
        shape = (len(views), len(views))
        self.version = 0
        self.links = Links(np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool))
        self._reported_s = np.zeros(shape)
        self._index = index
        self._workers = {view.worker_id: view.worker for view in views}
        for i, view in enumerate(views):
            self._fill(i, view)

    def update(self, i: int, view: WorkerView, before: WorkerView, *, same_links: bool) -> None:
        """Take over a newer view of the reader at position `i`.

        same_links: the reports of both views have equal links.
        """
        if same_links and view.reserved_link_bytes == before.reserved_link_bytes:
            return
        self.version += 1
        if same_links:
            self._add_reserved(i, dict.fromkeys(before.reserved_link_bytes, 0) | dict(view.reserved_link_bytes))
        else:
            self._fill(i, view)

    def _fill(self, i: int, view: WorkerView) -> None:
        links = self.links
        links.s_per_byte[i] = best_s_per_byte(view.report.links)
        self._reported_s[i] = 0.0
        links.is_broken[i] = links.is_warm[i] = False
        known = present_links(view.report.links, self._workers)
        if known:
            peers = [self._index[peer] for peer in known]
            links.s_per_byte[i, peers] = s_per_byte = [_s_per_byte(link) for link in known.values()]
            self._reported_s[i, peers] = [
                link.inflight_bytes * each for link, each in zip(known.values(), s_per_byte, strict=True)
            ]
            links.is_broken[i, peers] = [link.broken for link in known.values()]
            links.is_warm[i, peers] = [
                not link.broken and link.peer.is_same_incarnation(self._workers[peer]) for peer, link in known.items()
            ]
        links.queued_s[i] = self._reported_s[i]
        self._add_reserved(i, view.reserved_link_bytes)

    def _add_reserved(self, i: int, num_bytes: Mapping[str, int]) -> None:
        for peer, reserved_bytes in num_bytes.items():
            j = self._index.get(peer)
            if j is not None:
                self.links.queued_s[i, j] = self._reported_s[i, j] + reserved_bytes * self.links.s_per_byte[i, j]


def present_links(links: Sequence[LinkReport], workers: Mapping[str, WorkerRef]) -> dict[str, LinkReport]:
    """Return a reader's links to these workers, by id.

    A reader may still report its link to an earlier incarnation of a worker. That counts only if it has none
    to the present one.
    """
    found: dict[str, LinkReport] = {}
    for link in links:
        worker = workers.get(link.peer.worker_id)
        if worker is not None and (worker.worker_id not in found or link.peer.is_same_incarnation(worker)):
            found[worker.worker_id] = link
    return found


def _s_per_byte(link: LinkReport) -> float:
    return 1 / link.bytes_per_s if link.bytes_per_s > 0 and isfinite(link.bytes_per_s) else 1 / DEFAULT_LINK_BYTES_PER_S


def fastest_link(links: Sequence[LinkReport]) -> LinkReport | None:
    """Return the fastest working link that was measured, or None.

    Its bandwidth is expected of a peer that the worker has never read from.
    """
    known = [link for link in links if not link.broken and link.bytes_per_s > 0 and isfinite(link.bytes_per_s)]
    return max(known, key=lambda link: link.bytes_per_s, default=None)


def best_s_per_byte(links: Sequence[LinkReport]) -> float:
    """Return the seconds per byte of the fastest link, or of the assumed bandwidth if none was measured."""
    link = fastest_link(links)
    return 1 / DEFAULT_LINK_BYTES_PER_S if link is None else 1 / link.bytes_per_s
