"""Keeps a process listed among the members of a cluster."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, Membership
from baton.runtime.logging import get_logger

log = get_logger(__name__)

ADMIN_PORT = "admin_port"
"""Name of the admin port in `Member.info`. The port is at the host of the member's address."""
TTL_HEARTBEATS = 3
"""Default lifetime of an announcement, in heartbeats."""


def process_details(pid: int, host: str, admin_port: int | None) -> tuple[tuple[str, str], ...]:
    """Return the `info` of a member. With an admin port, gateways collect its metrics."""
    details = (("pid", str(pid)), ("host", host))
    return details if admin_port is None else (*details, (ADMIN_PORT, str(admin_port)))


class Announcements:
    """Announces one member every `heartbeat_s`; each announcement expires after `ttl_s`.

    An unavailable store is not an error: it is logged once, and again when the store is back.
    """

    def __init__(
        self,
        membership: Membership,
        member: Member,
        *,
        heartbeat_s: float,
        ttl_s: float | None = None,
        on_listed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create announcements that have not begun.

        on_listed: called after the first successful announcement, and after the first one since the store was
            unavailable. Peers that look for the member may have missed it until then.
        """
        self._membership = membership
        self._member = member
        self._heartbeat_s = heartbeat_s
        self._ttl_s = TTL_HEARTBEATS * heartbeat_s if ttl_s is None else ttl_s
        self._on_listed = on_listed
        self._is_listed = False
        self._is_unavailable = False

    async def announce(self) -> None:
        """Announce once. Takes at most as long as the store's own timeout."""
        try:
            await self._membership.announce(self._member, self._ttl_s)
        except StoreUnavailable as error:
            if not self._is_unavailable:
                log.warning(
                    "store_became_unavailable", use="membership", member=self._member.member_id, problem=str(error)
                )
            self._is_unavailable, self._is_listed = True, False
        else:
            if self._is_unavailable:
                log.info("store_recovered", use="membership", member=self._member.member_id)
            self._is_unavailable = False
            if not self._is_listed:
                self._is_listed = True
                self._on_listed()

    async def announce_forever(self) -> None:
        """Announce now and then every heartbeat, until cancelled."""
        await self.announce()
        await self.reannounce_forever()

    async def reannounce_forever(self) -> None:
        """Announce every heartbeat after the first one, for which the caller used `announce`."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.announce()

    async def withdraw(self) -> None:
        """Remove the member. If the store is unavailable, the announcement expires by itself."""
        with suppress(StoreUnavailable):
            await self._membership.withdraw(self._member)
