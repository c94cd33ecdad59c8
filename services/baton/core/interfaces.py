"""Protocols between the components. Each has at least two implementations and one contract test suite.

Service, client and test double implement the same Protocol, so a caller does not depend on whether a call
crosses a socket. No method blocks the event loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEvent, KvSnapshot, UnreadableEvent
from baton.core.messages.jobs import GatewayMessage, ReceivedGatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import RequestActuals
from baton.core.step_cost import StepCostModel

SendT = TypeVar("SendT", contravariant=True)
ReceiveT = TypeVar("ReceiveT", covariant=True)


class Source(Protocol[ReceiveT]):
    """The receiving half of a stream.

    It is not an async generator, so that an early exit is explicit (PEP 789).
    """

    async def receive(self) -> ReceiveT:
        """Return the next message, in the order sent.

        Raises StreamBroken once the other end has closed or is gone.
        """
        ...

    async def aclose(self) -> None:
        """Close the stream; the other end gets StreamBroken. Safe to call twice."""
        ...


class Duplex(Source[ReceiveT], Protocol[SendT, ReceiveT]):
    """One end of a bidirectional message stream."""

    def send(self, message: SendT) -> None:
        """Queue one message without waiting.

        Raises StreamBroken if the stream has ended, or if its bounded buffer is full, which ends the stream.
        """
        ...


class SchedulerApi(Protocol):
    """The calls of a scheduler for gateways and tools.

    Every method raises StreamBroken if the scheduler cannot be reached.
    """

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        """Place one request. Answers within `query.answer_within_s`.

        StillWaiting means that the request is still queued; send the same query again. Raises Refused
        (UNAVAILABLE) if this scheduler is shutting down; another one may answer.
        """
        ...

    async def finished(self, *actuals: RequestActuals) -> None:
        """Report the actual timings of placed requests that have ended."""
        ...

    async def watch(self) -> Source[ClusterUpdate]:
        """Return a stream with the state of all workers: now, and after each change."""
        ...

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the decision records of a request's attempts in order, or of the last request if None.

        Empty if the request is unknown or its records have expired.
        """
        ...

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        """Tell a worker to drain. Returns False if this scheduler does not know it.

        node_shutting_down: its machine is shutting down, so no replacement may start there
        """
        ...

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        """Tell all workers to erase the cached KV of a tenant. Returns their ids."""
        ...

    async def cache_stats(self) -> CacheStats:
        """Return the cache use of the requests that this scheduler has placed since its start."""
        ...


class SchedulerService(SchedulerApi, Protocol):
    """The interface between a scheduler and its server: `SchedulerApi` and the report streams of workers."""

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """Serve the report stream of one worker until it breaks."""
        ...


class WorkerService(Protocol):
    """The interface between a worker and its server.

    The end of a stream ends no job and no lease by itself.
    """

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        """Serve the session stream of one gateway until it ends."""
        ...

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        """Serve the stream of one peer that reads KV from this worker, until it ends."""
        ...

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        """Export a cached prefix, or import one. Raises Refused with the reason why that is not possible."""
        ...


class Network(Protocol):
    """Opens streams and calls to services by address: over gRPC, in one process, or simulated with delays and
    cuts.

    The `open_*` methods raise StreamBroken if no service answers at the address.
    """

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        """Open a gateway's session with a worker."""
        ...

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]:
        """Open a reader's stream to an owner of KV."""
        ...

    async def open_prefix_copy(self, address: str) -> Duplex[PrefixRequest, PrefixReply]:
        """Open a gateway's stream for an export or import of a prefix."""
        ...

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]:
        """Open a worker's report stream to a scheduler."""
        ...

    def scheduler(self, address: str) -> SchedulerApi:
        """Return a client for the scheduler at `address`. Does not connect yet."""
        ...

    def forget_scheduler(self, address: str) -> None:
        """Close the connection to a scheduler that is gone, once its running calls and streams have ended.

        An unknown address is ignored.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class MemberKind(Enum):
    """Kind of a service process."""

    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One running service process. `info` holds details for people, such as pid, host and log file."""

    kind: MemberKind
    member_id: str
    epoch: int
    address: str
    info: tuple[tuple[str, str], ...] = ()


class Membership(Protocol):
    """The directory of running service processes.

    Every method raises StoreUnavailable if the store cannot be reached; callers then keep their last known
    result.
    """

    async def announce(self, member: Member, ttl_s: float) -> None:
        """Add or renew a member. It is removed `ttl_s` seconds after its last announcement."""
        ...

    async def withdraw(self, member: Member) -> None:
        """Remove a member now."""
        ...

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        """Return the current members of one kind, sorted by id."""
        ...


class KvEventFeed(Protocol):
    """The shared log of which worker holds which block: one bounded stream and one snapshot per worker
    incarnation.

    Both expire `ttl_s` after the worker's last write or renewal. Every method raises StoreUnavailable if the
    store cannot be reached or refuses the call; a write may have happened nevertheless.
    """

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        """Append events in order. `event_seq` must grow; an event with a number that is not higher is
        refused.

        snapshot: replaces the previous one; it must include the last of these events
        """
        ...

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        """Replace the stream of a worker incarnation by the snapshot and one RESET event with the same
        number."""
        ...

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        """Extend the expiry.

        Returns the number of the last stored event; 0 if stream or snapshot is missing.
        """
        ...

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        """Return the last snapshot of a worker incarnation; None if there is none that can be decoded."""
        ...

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        """Return the events of each worker incarnation after the given number, in order.

        At most `max_events` per incarnation; those without new events are left out. If there are no events at
        all, it waits up to about `wait_s` seconds for one; the store may wait shorter.
        """
        ...


class DecisionStore(Protocol):
    """Stores decision records for a limited time.

    Every method raises StoreUnavailable if the store cannot be reached; a record is then lost.
    """

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        """Store a record for `ttl_s` seconds."""
        ...

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the records of one request in the order of attempts, or of the last stored request if
        None."""
        ...


class CostStore(Protocol):
    """Stores measured step costs under a key of model, device and threads, so that a restarted worker need
    not measure.

    Every method raises StoreUnavailable if the store cannot be reached.
    """

    async def put(self, key: str, costs: StepCostModel, ttl_s: float) -> None:
        """Store costs for `ttl_s` seconds."""
        ...

    async def get(self, key: str) -> StepCostModel | None:
        """Return the stored costs; None if there are none that this release can use."""
        ...


class GenerationTable(Protocol):
    """One 32-byte entry per block in memory that peers read, to validate their reads of the blocks.

    Entry: generation u64, block_hash 16 bytes, worker_epoch u64.
    """

    def begin_generation(self, block_id: int) -> int:
        """Increment the block's generation and clear its hash. Call it before the block is written.

        Returns the new generation.
        """
        ...

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """Set the hash of a block whose content is final."""
        ...

    def generation(self, block_id: int) -> int:
        """Return the current generation of a block's content, as in the generation table."""
        ...


class ReceivingPool(Protocol):
    """Operations of a pull on the blocks that it reads into. The engine's `BlockPool` implements it."""

    def mark_received(self, block_id: int, block_hash: BlockHash) -> None:
        """Make a validated block visible. NO_HASH: a partial last block, which is not shared."""
        ...

    def drop_receiving(self, block_ids: Sequence[int]) -> None:
        """Free blocks that will not be filled. No read of them may be running."""
        ...

    def num_refs(self, block_id: int) -> int:
        """Return how many sequences refer to a block."""
        ...

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Withdraw blocks whose content may be wrong, so that nobody finds them any more."""
        ...

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """Reserve blocks that a timed-out read may still write, until `end_quarantine`."""
        ...

    def end_quarantine(self, block_ids: Sequence[int]) -> None:
        """Free quarantined blocks, once their read is terminal."""
        ...


class PinPool(Protocol):
    """Operations of a KV owner on blocks that a transfer needs. The engine's `BlockPool` implements it."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from being reused."""
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo one `pin`."""
        ...

    def generation(self, block_id: int) -> int:
        """Return the current generation of a block's content, as in the generation table."""
        ...
