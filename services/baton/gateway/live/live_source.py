"""Connects the gateway's state with the live view's feed and with the pages of single requests."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from baton.core.client_api import ClusterStatus
from baton.core.errors import Refused
from baton.gateway.gateway_service import GatewayService
from baton.gateway.live.activity import Activity
from baton.gateway.live.live_feed import LiveFeed
from baton.gateway.live.snapshot import Clocks, PairCounts, decision_details, history, request_details, snapshot
from baton.gateway.live.traces.chrome_trace import recent_traces, trace_pieces

EXPLAIN_S = 0.5
"""Time to wait for a scheduler's decision record. Without it, the view shows what the gateway knows."""
MAX_EXPLAINING = 4
"""Explanations that viewers wait for at the same time. The feed waits for one more, of its own."""
MAX_FLOW_S = 5.0
"""Longest time between two snapshots whose difference counts as transfers in progress."""


class LiveSource:
    """Source of everything that the live view of one gateway shows. Used from its event loop."""

    def __init__(self, service: GatewayService, status: Callable[[], ClusterStatus], activity: Activity) -> None:
        self._service = service
        self._status = status
        self._activity = activity
        self._viewers_limit = asyncio.Semaphore(MAX_EXPLAINING)
        self._feed_limit = asyncio.Semaphore(1)
        self._tracing = asyncio.Lock()
        self._before = PairCounts.of(activity)
        self._before_s = 0.0
        self._explained: tuple[int, dict[str, Any] | None] = (0, None)
        """Number of decisions when the last one was explained, and its details with that number."""
        self.feed = LiveFeed(self._snapshot, self._history, self._explain_last)

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return what is known about a request: its waterfall and its decisions. None if it is unknown."""
        trace = self._activity.find(request_id)
        if trace is None:
            return None
        return {
            **request_details(trace, self._clocks()),
            "decisions": await self._explain(request_id, self._viewers_limit) or [],
        }

    async def chrome_trace(self, last_s: float) -> bytes:
        """Return the remembered requests of the last `last_s` seconds as JSON. One trace at a time."""
        async with self._tracing:
            clocks = self._clocks()
            traces = [*self._activity.ended, *self._activity.open_traces()]
            recent = recent_traces(traces, clocks.now_s, clocks.now_s - last_s)
            return await asyncio.to_thread(lambda: b"".join(trace_pieces(recent, clocks.now_s, clocks.unix_offset_s)))

    def _snapshot(self) -> dict[str, Any]:
        clocks, now = self._clocks(), PairCounts.of(self._activity)
        before = self._before if clocks.now_s - self._before_s <= MAX_FLOW_S else now
        self._before, self._before_s = now, clocks.now_s
        view, slo = self._service.view, self._service.rules.default_slo
        found = snapshot(self._status(), view.problem, slo, self._activity, before, clocks)
        return {**found, "why": self._explained[1], "has_login": self._service.keys.has_keys}

    def _history(self) -> list[dict[str, Any]]:
        return history(self._activity, self._clocks())

    async def _explain_last(self) -> None:
        """Fetch the details of the last decision, if there is a new one."""
        number = self._activity.num_decisions
        if number != self._explained[0] and self._activity.decisions:
            request_id = self._activity.decisions[-1].request_id
            details = await self._explain(request_id, self._feed_limit)
            if details is not None:
                self._explained = number, {"number": number, "id": request_id, "decisions": details}

    async def _explain(self, request_id: str, limit: asyncio.Semaphore) -> list[dict[str, Any]] | None:
        """Return the decisions about a request; None if no scheduler answered in time."""
        with suppress(Refused, TimeoutError):
            async with asyncio.timeout(EXPLAIN_S), limit:
                return decision_details(await self._service.schedulers.explain(bytes.fromhex(request_id)))
        return None

    def _clocks(self) -> Clocks:
        now_s = asyncio.get_running_loop().time()
        return Clocks(now_s=now_s, unix_offset_s=time.time() - now_s)
