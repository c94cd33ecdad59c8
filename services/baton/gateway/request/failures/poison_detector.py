"""Finds the request that kills workers.

A gateway cannot see which of the requests on a worker caused its death. It can see which requests were on two
workers that died in a row. If several requests qualify, they are run one at a time until the cause is known.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from baton.core.ids import Incarnation, WorkerRef

MAX_DEAD_WORKERS = 256
"""Number of dead workers to remember. The affected requests ask within moments of the death."""


class PoisonDetector:
    """Tracks requests that were running on a worker when it died, until they make progress again.

    A request that must run as the only tracked one holds `exclusive_lock`.
    """

    def __init__(self) -> None:
        self.exclusive_lock = asyncio.Lock()
        self._tracked: dict[Incarnation, set[bytes]] = {}
        self._tracked_at_death: OrderedDict[Incarnation, frozenset[bytes]] = OrderedDict()

    def track(self, request_id: bytes, worker: WorkerRef) -> None:
        """Record that the request was placed on this worker."""
        self._tracked.setdefault(worker.incarnation, set()).add(request_id)

    def untrack(self, request_id: bytes) -> None:
        """Stop suspecting the request of killing workers: it made progress, or its attempt ended."""
        for worker in [worker for worker, requests in self._tracked.items() if request_id in requests]:
            self._tracked[worker].discard(request_id)
            if not self._tracked[worker]:
                del self._tracked[worker]

    def tracks_others(self, request_id: bytes, workers: Iterable[WorkerRef]) -> bool:
        """True if another tracked request is on one of these workers now."""
        return any(self._tracked.get(worker.incarnation, set()) - {request_id} for worker in workers)

    def was_only_suspect(self, request_id: bytes, dead: WorkerRef) -> bool:
        """True if no other tracked request was on the worker when it died.

        All requests of a dead worker ask, one after another. Each gets the answer for the time of the death.
        """
        worker = dead.incarnation
        tracked = self._tracked_at_death.get(worker, frozenset()) | self._tracked.pop(worker, set())
        self._tracked_at_death[worker] = tracked
        if len(self._tracked_at_death) > MAX_DEAD_WORKERS:
            self._tracked_at_death.popitem(last=False)
        return not tracked - {request_id}
