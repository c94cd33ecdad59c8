"""How a process stays listed among the members of a cluster."""

import asyncio
from contextlib import suppress

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, Membership
from baton.runtime.logging import get_logger

log = get_logger(__name__)

TTL_HEARTBEATS = 3
"""An announcement ends when so many heartbeats bring no new one, unless another time is asked for."""


class Announcements:
    """Keeps one member listed, by an announcement every `heartbeat_s`, each of which ends by itself after
    `ttl_s`.

    A store that is away is no error: it is logged once, and again when it is back.
    """

    def __init__(
        self, membership: Membership, member: Member, *, heartbeat_s: float, ttl_s: float | None = None
    ) -> None:
        self._membership = membership
        self._member = member
        self._heartbeat_s = heartbeat_s
        self._ttl_s = TTL_HEARTBEATS * heartbeat_s if ttl_s is None else ttl_s
        self._is_away = False

    async def announce(self) -> None:
        """Once; waits no longer than the store's own bound."""
        try:
            await self._membership.announce(self._member, self._ttl_s)
        except StoreUnavailable as error:
            if not self._is_away:
                log.warning("store_away", member=self._member.member_id, problem=str(error))
            self._is_away = True
        else:
            if self._is_away:
                log.info("store_back", member=self._member.member_id)
            self._is_away = False

    async def keep(self) -> None:
        """Now, and again every heartbeat, for ever."""
        await self.announce()
        await self.repeat()

    async def repeat(self) -> None:
        """Every heartbeat, for ever; the first one was `announce`."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.announce()

    async def withdraw(self) -> None:
        """Be listed no more. Where the store is away the announcement ends by itself."""
        with suppress(StoreUnavailable):
            await self._membership.withdraw(self._member)
