"""The reader's side of all KV transfers of one worker: one link per owner incarnation, and the pulls on
them."""

import asyncio
import random
from collections.abc import Mapping, Sequence

from baton.core.cluster.worker_report import LinkReport
from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import Incarnation, JobId, ReadId, TransferId, WorkerRef
from baton.core.interfaces import Network, ReceivingPool
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_layout import KvLayout
from baton.core.kv.kv_tables import hashes_of_prefix
from baton.core.messages.peer_messages import HashRange
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.backend import TransferBackend
from baton.transfer.reader.peer_link import PeerLink
from baton.transfer.reader.peer_reads import ReaderTimes, Reading
from baton.transfer.reader.pull import Pull
from baton.transfer.reader.quarantine import Quarantine
from baton.transfer.reader.transfer_observer import NoObserver, TransferObserver

MAX_QUARANTINED_SHARE = 0.10
"""A worker with a larger share of quarantined blocks should be replaced."""


class KvReader:
    """Pulls KV blocks from the memory of other workers. Used from one event loop; no method blocks."""

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        backend: TransferBackend,
        network: Network,
        pool: ReceivingPool,
        rng: random.Random,
        times: ReaderTimes,
        min_link_gbps: float = 0.0,
        observer: TransferObserver | None = None,
        tracing: Tracing = OFF,
        not_available: Mapping[str, str] | None = None,
    ) -> None:
        """Create a reader without links.

        min_link_gbps: links measured below this many gigabits per second are not used; 0 uses any
        not_available: by name, why backends that were asked for could not be opened
        """
        self._last_read_id = 0
        self._rng = rng
        self._num_blocks = backend.num_blocks
        self._links: dict[Incarnation, PeerLink] = {}
        self._quarantine = Quarantine(backend, pool)
        self._is_closed = False
        self._closing: dict[asyncio.Task[None], None] = {}
        self._reading = Reading(
            worker=worker,
            layout=layout,
            backend=backend,
            network=network,
            pool=pool,
            rng=rng,
            observer=observer or NoObserver(),
            times=times,
            min_link_gbps=min_link_gbps,
            quarantine=self._quarantine,
            next_read_id=self._next_read_id,
            tracing=tracing,
            not_available=not_available or {},
        )

    def pull(
        self,
        owner: WorkerRef,
        subject: JobId | HashRange,
        *,
        have_blocks: int,
        expected: Sequence[BlockHash] = (),
        deadline_s: float | None = None,
        trace_context: str = "",
    ) -> Pull:
        """Start to pull the KV of a job, or a cached prefix, from its owner.

        have_blocks: number of leading blocks that are here already, of those that are needed over all block
            tables
        expected: locally computed hashes of the needed full blocks of a job, which the owner's hashes must
            equal
        deadline_s: the pull fails with Reason.DEADLINE after this time
        trace_context: parent of the pull's span

        Raises Refused (retriable, blames the owner) while the link is broken.
        """
        link = self._link_to(owner)
        if link.broken_by is not None:
            message = f"the link to {owner} is not used ({link.problem}); it is tried again"
            raise Refused(
                Failure(code=Code.UNAVAILABLE, reason=link.broken_by, message=message, retriable=True, blamed=owner)
            )
        if isinstance(subject, HashRange):
            expected = hashes_of_prefix(subject.hashes, self._reading.layout.windows)
        pull = Pull(
            link,
            transfer_id=TransferId(self._rng.randrange(1, 2**64)),
            subject=subject,
            have_blocks=have_blocks,
            expected=expected,
            pool=self._reading.pool,
            deadline_s=deadline_s,
            span=self._reading.tracing.start("kv pull", trace_context, kind="client"),
        )
        link.follow(pull)
        return pull

    def warm(self, owner: WorkerRef) -> None:
        """Start to connect to an owner and to measure the link, before the first pull.

        Does nothing if connected.
        """
        self._link_to(owner)

    async def warmed(self, owner: WorkerRef) -> bool:
        """Connect to an owner and measure the link. Returns True if the link is usable."""
        return await self._link_to(owner).warmed()

    def probe(self, owner: WorkerRef) -> None:
        """Start a small read from an owner, to check that the link works and to measure it."""
        self._link_to(owner).probe()

    def forget(self, owner: WorkerRef) -> None:
        """Close the link to an owner incarnation that has ended. Its pulls fail."""
        link = self._links.get(owner.incarnation)
        if link is not None:
            link.close(Reason.WORKER_LOST, "the owner is gone")

    def links(self) -> tuple[LinkReport, ...]:
        """Return the state of all links, sorted by owner."""
        return tuple(link.report() for _incarnation, link in sorted(self._links.items()))

    @property
    def quarantined_blocks(self) -> int:
        """Number of own blocks that a timed-out read, or one in doubt, may still write."""
        return self._quarantine.num_blocks

    @property
    def transfer_failure(self) -> BaseException | None:
        """The error after which the transfer backend moves no KV any more; None while it works."""
        return self._reading.backend.failure

    @property
    def needs_replacement(self) -> bool:
        """True if this worker should be replaced: too many blocks are quarantined, or reads in doubt block a
        link."""
        return self.quarantined_blocks > MAX_QUARANTINED_SHARE * self._num_blocks or any(
            link.is_blocked for link in self._links.values()
        )

    async def aclose(self) -> None:
        """End all pulls and links and refuse new ones.

        Returns when every read is terminal or past its deadline.
        """
        self._is_closed = True
        for link in list(self._links.values()):
            link.close(Reason.WORKER_LOST, "the reader is shutting down")
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._quarantine.aclose()

    def _link_to(self, owner: WorkerRef) -> PeerLink:
        if self._is_closed:
            message = "this worker is shutting down and starts no KV pulls"
            raise Refused(Failure(code=Code.UNAVAILABLE, reason=Reason.DRAINING, message=message, retriable=True))
        link = self._links.get(owner.incarnation)
        if link is None:
            link = self._links[owner.incarnation] = PeerLink(owner, self._reading, self._link_ended)
        return link

    def _link_ended(self, link: PeerLink) -> None:
        if self._links.get(link.owner.incarnation) is link:
            del self._links[link.owner.incarnation]
        closing = asyncio.get_running_loop().create_task(link.aclose())
        self._closing[closing] = None
        closing.add_done_callback(self._closing.pop)

    def _next_read_id(self) -> ReadId:
        self._last_read_id += 1
        return ReadId(self._last_read_id)
