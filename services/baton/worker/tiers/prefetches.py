"""Reloads a session's prefix before its next turn, if the client has said when that will be.

What a tenant's announced turns may take of the device is bounded by its retention budget. A turn that comes
early or not at all costs only the copies.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.retention.content_owner import ContentOwner
from baton.engine.retention.content_owners import ContentOwners, OwnedRequest
from baton.engine.tiers.kv_tier import KvTier
from baton.worker.tiers.reloads import Reloads

LEAD_FACTOR = 2.0
"""A reload begins this many times its predicted duration before the announced turn."""
EARLY_SHARE, EARLY_S = 0.05, 0.1
"""It begins earlier by this share of the announced pause and this time, because clients are not exact."""
LATE_SHARE, LATE_S = 0.5, 1.0
"""Reloaded content is retained for so much longer if the turn is late."""


@dataclass(slots=True, kw_only=True)
class PrefetchTotals:
    """Counters since the start.

    started: reloads before a turn. early: turns that came before their reload. refused: announced turns for
    which the tenant had no budget left.
    """

    started: int = 0
    early: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announced:
    request: OwnedRequest
    timer: asyncio.TimerHandle
    num_blocks: int


class Prefetches:
    """The announced turns of one worker. Used from one event loop."""

    def __init__(self, reloads: Reloads, tiers: Sequence[KvTier], owners: ContentOwners, *, tenant_blocks: int) -> None:
        """tenant_blocks: device blocks that the announced turns of one tenant may take"""
        self.totals = PrefetchTotals()
        self._reloads, self._tiers, self._owners = reloads, tiers, owners
        self._tenant_blocks = tenant_blocks
        self._announced: dict[ContentOwner, _Announced] = {}
        self._by_tenant: dict[str, int] = {}
        owners.on_change(self._owner_changed)

    def __len__(self) -> int:
        """Return the number of announced turns."""
        return len(self._announced)

    def expect(self, request: OwnedRequest) -> None:
        """Reload what a request has left before the next one of its session, if that is announced."""
        owner, next_in_s = request.owner, request.hints.next_in_s
        if next_in_s is None or not owner.chain or owner.num_running or owner in self._announced:
            return
        tenant = owner.tenant
        num_blocks = min(len(owner.chain), self._tenant_blocks - self._by_tenant.get(tenant, 0))
        if num_blocks <= 0:
            self.totals.refused += 1
            owner.chain = ()
            return
        load_s = max((tier.load_s(num_blocks) or 0.0 for tier in self._tiers), default=0.0)
        lead_s = LEAD_FACTOR * load_s + EARLY_SHARE * next_in_s + EARLY_S
        timer = asyncio.get_running_loop().call_later(max(0.0, next_in_s - lead_s), self._start, owner, lead_s)
        owner.chain = owner.chain[:num_blocks]
        self._announced[owner] = _Announced(request=request, timer=timer, num_blocks=num_blocks)
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + num_blocks

    def close(self) -> None:
        """Forget all announced turns."""
        for owner in list(self._announced):
            self._forget(owner)

    def _start(self, owner: ContentOwner, lead_s: float) -> None:
        request = self._forget(owner).request
        late_s = LATE_SHARE * (request.hints.next_in_s or 0.0) + LATE_S
        self._owners.retain_until(request, asyncio.get_running_loop().time() + lead_s + late_s)
        self._reloads.start(owner.chain, owner.tenant_root, owner)
        owner.chain = ()
        self.totals.started += 1

    def _owner_changed(self, owner: ContentOwner) -> None:
        if owner.num_running and owner in self._announced:
            self._forget(owner)
            self.totals.early += 1

    def _forget(self, owner: ContentOwner) -> _Announced:
        announced = self._announced.pop(owner)
        announced.timer.cancel()
        self._by_tenant[owner.tenant] -= announced.num_blocks
        if not self._by_tenant[owner.tenant]:
            del self._by_tenant[owner.tenant]
        return announced
