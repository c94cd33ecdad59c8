"""The seams: what one part may ask of another. Each Protocol has at least two implementations and one
contract suite.

Service, client and test double share one Protocol, so a caller cannot tell a socket from a function call. No
method blocks the event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection, StillWaiting
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import WorkerReport
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.kv.kv_events import KvEvent, KvSnapshot, UnreadableEvent
from baton.core.messages.jobs import GatewayMessage, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.request import RequestActuals
from baton.core.step_cost import StepCostModel

SendT = TypeVar("SendT", contravariant=True)
ReceiveT = TypeVar("ReceiveT", covariant=True)


class Source(Protocol[ReceiveT]):
    """The receiving half of a stream. An object, not an async generator, so that leaving it early is explicit
    (PEP 789)."""

    async def receive(self) -> ReceiveT:
        """The next message, in the order sent. Raises StreamBroken once the other end is gone, cleanly or
        not."""
        ...

    async def aclose(self) -> None:
        """End the stream; the other end sees StreamBroken. Safe to call twice."""
        ...


class Duplex(Source[ReceiveT], Protocol[SendT, ReceiveT]):
    """One end of a two-way message stream."""

    def send(self, message: SendT) -> None:
        """Queue one message; never waits. Raises StreamBroken if the stream has ended or its bounded buffer
        is full (which ends it)."""
        ...


class SchedulerApi(Protocol):
    """What gateways and tools ask of a scheduler. Every method raises StreamBroken when the scheduler cannot
    be reached."""

    async def place(self, query: PlacementQuery) -> Placement | Rejection | StillWaiting:
        """Answers within `query.answer_within_s`, in the middle of a long wait with StillWaiting: then the
        same is asked again. Raises Refused (UNAVAILABLE) when this scheduler leaves: another one may
        answer."""
        ...

    async def finished(self, *actuals: RequestActuals) -> None:
        """What became of placed requests, all that ended within a short while at once."""
        ...

    async def watch(self) -> Source[ClusterUpdate]:
        """All workers now, then again after each change."""
        ...

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Decision records of a request's attempts in order, or of the last request (None). Empty if unknown
        or expired."""
        ...

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        """Ask a worker to finish and leave; False if this scheduler does not know it. `node_shutting_down`:
        its machine is about to end, so no worker shall take its place there."""
        ...


class SchedulerService(SchedulerApi, Protocol):
    """A scheduler as its server sees it: the calls above and the workers' report streams."""

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """Serve one worker's report stream until it breaks."""
        ...


class WorkerService(Protocol):
    """A worker as its server sees it. Both return when the stream has ended; neither ends a job or a lease by
    itself."""

    async def session(self, stream: Duplex[WorkerMessage, GatewayMessage]) -> None: ...

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None: ...


class Network(Protocol):
    """The calls leaf: dials services by address. `wire` does it over gRPC, `sim` in one process with delays
    and cuts."""

    async def open_session(self, address: str) -> Duplex[GatewayMessage, WorkerMessage]:
        """Raises StreamBroken if nobody answers there; so do the others."""
        ...

    async def open_peer(self, address: str) -> Duplex[ReaderMessage, OwnerMessage]: ...

    async def open_report(self, address: str) -> Duplex[WorkerReport, WorkerCommand]: ...

    def scheduler(self, address: str) -> SchedulerApi: ...

    async def aclose(self) -> None: ...


class MemberKind(Enum):
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One living process as others find it. `info` holds small facts for people (pid, host, log file)."""

    kind: MemberKind
    member_id: str
    epoch: int
    address: str
    info: tuple[tuple[str, str], ...] = ()


class Membership(Protocol):
    """Who is there. Entries end by themselves `ttl_s` after their last announcement. Raises StoreUnavailable
    when the store is away: callers keep what they last knew."""

    async def announce(self, member: Member, ttl_s: float) -> None: ...

    async def withdraw(self, member: Member) -> None: ...

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        """Living members, sorted by id."""
        ...


class KvEventFeed(Protocol):
    """The shared log of who holds which block: for each worker life a stream of bounded length and one
    snapshot. Both end `ttl_s` after that worker last wrote or renewed. Every method raises StoreUnavailable
    when the store is away or refuses; a write may then have happened."""

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        """Append, in order. `event_seq` grows within a life; refused where the stream has as high a number
        already. `snapshot`, if one is due, replaces the last one and counts the last of these events."""
        ...

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        """Begin the life's stream anew, whatever stood in it: the snapshot, and a RESET of the same number as
        the only event."""
        ...

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        """The number of the last event that is kept; 0 if stream or snapshot is not there (any more)."""
        ...

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        """The last one written; None if there is none that can be read."""
        ...

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        """Events of each life that come after that number, at most `max_events` a life, by number. Where
        there are none at all, waits for one, about `wait_s` at most (the store may bound it); lives without
        events are not in the answer."""
        ...


class DecisionStore(Protocol):
    """Where decision records are kept for a while. Raises StoreUnavailable when the store is away; the record
    is then lost."""

    async def put(self, record: DecisionRecord, ttl_s: float) -> None: ...

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Records of one request by attempt, or of the last one put (None)."""
        ...


class CostStore(Protocol):
    """What engine steps cost, by whatever decides it (model, device, threads), so that a worker that starts
    again need not measure. Raises StoreUnavailable when the store is away."""

    async def put(self, key: str, costs: StepCostModel, ttl_s: float) -> None: ...

    async def get(self, key: str) -> StepCostModel | None:
        """None where nothing is kept that this release can use."""
        ...


class GenerationTable(Protocol):
    """One 32-byte entry a block, {life u64, block_hash 16 bytes, worker_epoch u64}, in memory that peers read
    as the proof of a pull."""

    def begin_generation(self, block_id: int) -> int:
        """Bump the block's life and clear its hash, before anyone may write the block. Returns the new
        life."""
        ...

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """The block's content is final."""
        ...

    def generation(self, block_id: int) -> int: ...


class ReceivingPool(Protocol):
    """What a pull may do with the blocks it lands in. The engine's `BlockPool` implements it."""

    def mark_received(self, block_id: int, block_hash: BlockHash) -> None:
        """The block is read, in lease and proven: it becomes visible (NO_HASH: a tail that is not shared)."""
        ...

    def drop_receiving(self, block_ids: Sequence[int]) -> None:
        """These will not be filled and no read of them is running: free again."""
        ...

    def quarantine(self, block_ids: Sequence[int]) -> None:
        """A read of these was given up and may still write: out of use until `end_quarantine`."""
        ...

    def end_quarantine(self, block_ids: Sequence[int]) -> None: ...


class PinPool(Protocol):
    """What the owner of KV may do with blocks that a transfer needs. The engine's `BlockPool` implements
    it."""

    def pin(self, block_ids: Sequence[int]) -> None: ...

    def unpin(self, block_ids: Sequence[int]) -> None: ...

    def generation(self, block_id: int) -> int: ...
