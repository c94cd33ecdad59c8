"""Holds the speed and state of the links between all workers in arrays [reader, source]."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.worker_report import LinkReport, present_links
from baton.core.ids import WorkerRef
from baton.scheduler.state.worker_data import Floats, Mask

DEFAULT_LINK_BYTES_PER_S = 1e9
"""Assumed bandwidth of a pair of workers while its reader has measured no pair."""
DEFAULT_PULL_S, DEFAULT_EXPOSED_S, DEFAULT_DIAL_S = 0.002, 0.001, 0.05
"""Assumed fixed costs of a pull (`LinkReport`) while its reader has measured none."""


@dataclass(frozen=True, slots=True)
class Links:
    """The speed and state of the links between workers. All arrays are [reader, source]."""

    s_per_byte: Floats
    queued_s: Floats  # time for the reads under way plus those of own placements
    pull_s: Floats  # pull of a cached prefix, beyond its bytes
    exposed_s: Floats  # pull of a prompt's KV once the prompt is computed, beyond its bytes
    dial_s: Floats  # what the first pull of a pair takes longer; 0 if the pair is connected
    is_broken: Mask  # a read was given up and no probe has succeeded since
    is_warm: Mask  # the pair is connected with the source's current epoch


class LinkArrays:
    """`Links` that are updated in place. `version` grows with each change."""

    def __init__(self, views: Sequence[WorkerView], index: Mapping[str, int]) -> None:
        shape = (len(views), len(views))
        self.version = 0
        s_per_byte, queued_s, pull_s, exposed_s, dial_s = (np.zeros(shape) for _ in range(5))
        is_broken, is_warm = (np.zeros(shape, dtype=bool) for _ in range(2))
        self.links = Links(s_per_byte, queued_s, pull_s, exposed_s, dial_s, is_broken, is_warm)
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
        links, expected = self.links, expected_link(view.report.links)
        links.s_per_byte[i], links.pull_s[i] = expected.s_per_byte, expected.pull_s
        links.exposed_s[i], links.dial_s[i] = expected.exposed_s, expected.dial_s
        self._reported_s[i] = 0.0
        links.is_broken[i] = links.is_warm[i] = False
        known = present_links(view.report.links, self._workers)
        if known:
            peers = [self._index[peer] for peer in known]
            links.s_per_byte[i, peers] = s_per_byte = [_s_per_byte(link) for link in known.values()]
            links.pull_s[i, peers] = [_measured(link.pull_s) or expected.pull_s for link in known.values()]
            links.exposed_s[i, peers] = [_measured(link.exposed_s) or expected.exposed_s for link in known.values()]
            links.dial_s[i, peers] = [
                0.0 if _is_connected(link, self._workers[peer]) else _measured(link.dial_s) or expected.dial_s
                for peer, link in known.items()
            ]
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


def _s_per_byte(link: LinkReport) -> float:
    return 1 / link.bytes_per_s if link.bytes_per_s > 0 and isfinite(link.bytes_per_s) else 1 / DEFAULT_LINK_BYTES_PER_S


def _measured(seconds: float) -> float:
    """Return a reported time, or 0 if it is none."""
    return seconds if 0 < seconds < inf else 0.0


def _is_connected(link: LinkReport, source: WorkerRef) -> bool:
    """Return True if a pull need not wait for the connection."""
    return link.peer.is_same_incarnation(source) and (link.dial_s > 0 or link.bytes_per_s > 0)


@dataclass(frozen=True, slots=True)
class ExpectedLink:
    """The costs that are expected of a peer from which a worker has never read. See `Links`."""

    s_per_byte: float
    pull_s: float
    exposed_s: float
    dial_s: float


def fastest_link(links: Sequence[LinkReport]) -> LinkReport | None:
    """Return the fastest working link that was measured, or None.

    Its speed and fixed costs are expected of a peer that the worker has never read from.
    """
    known = [link for link in links if not link.broken and link.bytes_per_s > 0 and isfinite(link.bytes_per_s)]
    return max(known, key=lambda link: link.bytes_per_s, default=None)


def expected_link(links: Sequence[LinkReport]) -> ExpectedLink:
    """Return what the fastest link shows, or assumed values where nothing was measured."""
    link = fastest_link(links)
    if link is None:
        return ExpectedLink(1 / DEFAULT_LINK_BYTES_PER_S, DEFAULT_PULL_S, DEFAULT_EXPOSED_S, DEFAULT_DIAL_S)
    return ExpectedLink(
        s_per_byte=1 / link.bytes_per_s,
        pull_s=_measured(link.pull_s) or DEFAULT_PULL_S,
        exposed_s=_measured(link.exposed_s) or DEFAULT_EXPOSED_S,
        dial_s=_measured(link.dial_s) or DEFAULT_DIAL_S,
    )
