"""Reloads a session's prefix before its next turn, if the client has said when that will be.

What a tenant's announced turns may take of the device is bounded (`engine.retention.announced_turns`). A turn
that comes early or not at all costs only the copies.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.retention.announced_turns import end_of_turn_s
from baton.engine.retention.content_owner import ContentOwner
from baton.engine.retention.content_owners import ContentOwners, OwnedRequest
from baton.engine.tiers.kv_tier import KvTier
from baton.worker.tiers.reloads import Reloads

LEAD_FACTOR = 2.0
"""A reload begins this many times its predicted duration before the announced turn."""
EARLY_SHARE, EARLY_S = 0.05, 0.1
"""It begins earlier by this share of the announced pause and this time, because clients are not exact."""


@dataclass(slots=True, kw_only=True)
class PrefetchTotals:
    """Counters since the start.

    started: reloads before a turn. early: turns that came before their reload.
    """

    started: int = 0
    early: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    request: OwnedRequest
    timer: asyncio.TimerHandle
    until_s: float


class Prefetches:
    """The announced turns of one worker. Used from one event loop."""

    def __init__(self, reloads: Reloads, tiers: Sequence[KvTier], owners: ContentOwners) -> None:
        self.totals = PrefetchTotals()
        self._reloads, self._tiers, self._owners = reloads, tiers, owners
        self._announced: dict[ContentOwner, _Announced] = {}
        owners.on_change(self._owner_changed)

    def __len__(self) -> int:
        """Return the number of announced turns."""
        return len(self._announced)

    def expect(self, request: OwnedRequest) -> None:
        """Reload what a request has left before the next one of its session, if that is announced."""
        owner, next_in_s = request.owner, request.hints.next_in_s
        if next_in_s is None or not owner.chain or owner.num_running or owner in self._announced:
            return
        loop = asyncio.get_running_loop()
        load_s = max((tier.load_s(len(owner.chain)) or 0.0 for tier in self._tiers), default=0.0)
        lead_s = LEAD_FACTOR * load_s + EARLY_SHARE * next_in_s + EARLY_S
        timer = loop.call_later(max(0.0, next_in_s - lead_s), self._start, owner)
        until_s = end_of_turn_s(loop.time(), next_in_s)
        self._announced[owner] = _Announced(request=request, timer=timer, until_s=until_s)

    def close(self) -> None:
        """Forget all announced turns."""
        for owner in list(self._announced):
            self._forget(owner)

    def _start(self, owner: ContentOwner) -> None:
        announced = self._forget(owner)
        self._owners.retain_until(announced.request, announced.until_s)
        self._reloads.start(owner.chain, owner.tenant_root, owner)
        owner.chain = ()
        self.totals.started += 1

    def _owner_changed(self, owner: ContentOwner) -> None:
        if (owner.num_running or owner.has_moved) and owner in self._announced:
            self._forget(owner)
            self.totals.early += not owner.has_moved

    def _forget(self, owner: ContentOwner) -> _Announced:
        announced = self._announced.pop(owner)
        announced.timer.cancel()
        return announced
