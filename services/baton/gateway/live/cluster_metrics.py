"""Collects the metrics of all processes of the cluster for `/metrics/cluster`.

The processes are the members that announce an admin port. Only the port comes from the announcement: the host
is the one at which the member serves, so that an announcement cannot point to another machine.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import StoreUnavailable
from baton.core.interfaces import Member, MemberKind, Membership
from baton.gateway.live.metrics_page import ProcessMetricsPage, merge_pages
from baton.runtime.network.addresses import host_of, join_address
from baton.runtime.network.announcements import ADMIN_PORT

PROCESS_S = 2.0
"""Time in which one process must have sent its metrics."""
MAX_PAGE_BYTES = 4 * 2**20
MAX_TOTAL_BYTES = 64 * 2**20
"""Size of all pages of one collection. Pages that would exceed it are dropped."""
MAX_PROCESSES = 256
MAX_CONCURRENT = 16
KEEP_S = 1.0
"""Time for which a collected page is given to further readers."""
REMEMBER_S = 600.0
"""Time for which a process that is no longer a member is listed as down."""


@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """One process with an admin port at `instance` (HOST:PORT)."""

    kind: str
    process: str
    instance: str


def target_of(member: Member) -> MetricsTarget | None:
    """Return where a member serves its metrics, or None if it announces no valid admin port."""
    port = dict(member.info).get(ADMIN_PORT, "")
    host = host_of(member.address)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536 and host):
        return None
    return MetricsTarget(member.kind.value, member.member_id, join_address(host, int(port)))


class KnownTargets:
    """The members with an admin port, and those that were members until recently.

    A process that was restarted replaces its earlier self, since it has the same id. A scheduler gets a new
    id, so the old one is listed as down for `REMEMBER_S`.
    """

    def __init__(self, membership: Membership | None, clock: Callable[[], float]) -> None:
        self._membership = membership
        self._clock = clock
        self._seen_s: dict[tuple[str, str], tuple[float, MetricsTarget]] = {}

    async def targets(self) -> list[MetricsTarget]:
        """Return the targets in the order of kind and id, at most `MAX_PROCESSES`.

        If the store does not answer, those of the last call are returned.
        """
        now_s = self._clock()
        if self._membership is not None:
            with suppress(StoreUnavailable):
                for kind in MemberKind:
                    for member in await self._membership.members(kind):
                        if (target := target_of(member)) is not None:
                            self._seen_s[target.kind, target.process] = now_s, target
        recent = sorted(self._seen_s.values(), key=lambda seen: -seen[0])[:MAX_PROCESSES]
        self._seen_s = {(target.kind, target.process): (s, target) for s, target in recent if now_s - s <= REMEMBER_S}
        return sorted((target for _, target in self._seen_s.values()), key=lambda t: (t.kind, t.process))


class ClusterMetrics:
    """Collects one page for all readers at a time. Used from one event loop."""

    def __init__(
        self,
        known: KnownTargets,
        own: MetricsTarget,
        own_text: Callable[[], str],
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        """`own` and `own_text`: this process and its metrics, which need no connection."""
        self._known = known
        self._own = own
        self._own_text = own_text
        self._max_total_bytes = max_total_bytes
        self._page: asyncio.Task[bytes] | None = None
        self._page_s = 0.0

    async def page(self) -> bytes:
        """Return the metrics of all processes, at most `KEEP_S` old. Concurrent calls share a collection."""
        now_s = asyncio.get_running_loop().time()
        if self._page is None or (self._page.done() and now_s - self._page_s > KEEP_S):
            self._page_s = now_s
            self._page = asyncio.create_task(self._collect(), name="cluster-metrics")
        return await asyncio.shield(self._page)

    async def aclose(self) -> None:
        """Stop a collection that is under way."""
        if self._page is not None:
            self._page.cancel()
            await asyncio.wait((self._page,))

    async def _collect(self) -> bytes:
        slots = asyncio.Semaphore(MAX_CONCURRENT)
        targets = [t for t in await self._known.targets() if (t.kind, t.process) != (self._own.kind, self._own.process)]

        free_bytes = self._max_total_bytes

        async def read(target: MetricsTarget) -> str | None:
            nonlocal free_bytes
            async with slots:
                body = await read_metrics(target.instance, max_bytes=min(MAX_PAGE_BYTES, free_bytes))
            if body is None or len(body) > free_bytes:
                return None
            free_bytes -= len(body)
            return body.decode(errors="replace")

        texts = await asyncio.gather(*(read(target) for target in targets))
        pages = [
            ProcessMetricsPage(kind=target.kind, process=target.process, instance=target.instance, text=text)
            for target, text in ((self._own, self._own_text()), *zip(targets, texts, strict=True))
        ]
        return (await asyncio.to_thread(merge_pages, pages)).encode()


async def read_metrics(address: str, timeout_s: float = PROCESS_S, max_bytes: int = MAX_PAGE_BYTES) -> bytes | None:
    """Return the metrics page at an admin port, or None if it does not arrive in time or is too large."""
    try:
        async with asyncio.timeout(timeout_s):
            # HTTP/1.0: the body is not chunked, and ends with the connection
            reader, writer = await asyncio.open_connection(host_of(address), int(address.rpartition(":")[2]))
            try:
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                answer = bytearray()
                while data := await reader.read(65536):
                    answer += data
                    if len(answer) > max_bytes:
                        return None
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None
