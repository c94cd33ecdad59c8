"""The shared stores of a simulated cluster: the in-memory ones, behind faults of a Redis server."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from random import Random
from typing import TypeVar

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.errors import StoreUnavailable
from baton.core.ids import WorkerRef
from baton.core.interfaces import DecisionStore, KvEventFeed, Member, MemberKind, Membership
from baton.core.kv.kv_events import KvEvent, KvSnapshot, UnreadableEvent
from baton.sim.virtual_time import PROCESS
from baton.store.memory.memory_stores import MemoryDecisionStore, MemoryKvEventFeed, MemoryMembership

T = TypeVar("T")

CALL_S = 1.0
"""Time limit of a call, as `RedisConnection` has it."""


class StoreFault(Enum):
    """State of the store server.

    DOWN: refuses every call. HANGING: answers no call. FULL: refuses writes.
    UNSTABLE: half of the calls fail, some of them after they were done.
    """

    NONE = "none"
    DOWN = "down"
    HANGING = "hanging"
    FULL = "full"
    UNSTABLE = "unstable"


class SimStores:
    """The stores of one cluster. All processes use the same server, and see its fault.

    clock: time of the store server, in seconds.
    fault: present state of the server.
    """

    def __init__(self, rng: Random, clock: Callable[[], float]) -> None:
        self._rng = rng
        self._clock = clock
        self._fault = StoreFault.NONE
        self._fault_ended = asyncio.Event()
        self._dead: set[str] = set()
        self.flush()
        self.membership = FaultyMembership(self)
        self.decisions = FaultyDecisionStore(self)
        self.feed = FaultyKvEventFeed(self)

    @property
    def fault(self) -> StoreFault:
        """Present state of the server."""
        return self._fault

    @fault.setter
    def fault(self, fault: StoreFault) -> None:
        self._fault = fault
        self._fault_ended.set()
        self._fault_ended = asyncio.Event()

    def flush(self) -> None:
        """Lose all data, as FLUSHALL or a restart without a file does."""
        self.memory_membership = MemoryMembership(self._clock)
        self.memory_decisions = MemoryDecisionStore(self._clock)
        self.memory_feed = MemoryKvEventFeed(self._clock)

    def disconnect(self, process: str) -> None:
        """Refuse the calls of a process that was killed and is being cleaned up."""
        self._dead.add(process)

    def connect(self, process: str) -> None:
        """Accept the calls of a process."""
        self._dead.discard(process)

    async def call(self, call: Callable[[], Awaitable[T]], *, is_write: bool) -> T:
        """Make a call as far as the present fault allows. Raises StoreUnavailable if it fails."""
        if PROCESS.get() in self._dead:
            raise StoreUnavailable("the process is dead")
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                while self._fault is StoreFault.HANGING:
                    await self._fault_ended.wait()
        match self._fault:
            case StoreFault.HANGING:
                raise StoreUnavailable(f"the store did not answer within {CALL_S:g} s")
            case StoreFault.DOWN:
                raise StoreUnavailable("the store refuses the connection")
            case StoreFault.FULL if is_write:
                raise StoreUnavailable("the store is out of memory")
            case StoreFault.UNSTABLE if self._rng.random() < 0.5:
                if self._rng.random() < 0.5:
                    await call()
                raise StoreUnavailable("the connection broke")
        return await call()


class FaultyMembership(Membership):
    """Implements `Membership`."""

    def __init__(self, stores: SimStores) -> None:
        self._stores = stores

    async def announce(self, member: Member, ttl_s: float) -> None:
        await self._stores.call(lambda: self._stores.memory_membership.announce(member, ttl_s), is_write=True)

    async def withdraw(self, member: Member) -> None:
        await self._stores.call(lambda: self._stores.memory_membership.withdraw(member), is_write=False)

    async def members(self, kind: MemberKind) -> tuple[Member, ...]:
        return await self._stores.call(lambda: self._stores.memory_membership.members(kind), is_write=False)


class FaultyDecisionStore(DecisionStore):
    """Implements `DecisionStore`."""

    def __init__(self, stores: SimStores) -> None:
        self._stores = stores

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        await self._stores.call(lambda: self._stores.memory_decisions.put(record, ttl_s), is_write=True)

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return await self._stores.call(lambda: self._stores.memory_decisions.get(request_id), is_write=False)


class FaultyKvEventFeed(KvEventFeed):
    """Implements `KvEventFeed`."""

    def __init__(self, stores: SimStores) -> None:
        self._stores = stores

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        await self._write(worker, lambda: self._stores.memory_feed.publish(worker, events, ttl_s, snapshot))

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        await self._write(snapshot.worker, lambda: self._stores.memory_feed.reset(snapshot, ttl_s))

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        return await self._stores.call(lambda: self._stores.memory_feed.renew(worker, ttl_s), is_write=True)

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        return await self._stores.call(lambda: self._stores.memory_feed.snapshot(worker), is_write=False)

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        return await self._stores.call(
            lambda: self._stores.memory_feed.read(after, max_events=max_events, wait_s=min(wait_s, CALL_S)),
            is_write=False,
        )

    async def _write(self, worker: WorkerRef, write: Callable[[], Awaitable[None]]) -> None:
        """Write, or remove what the worker has written if the server is full, as `RedisKvEventFeed` does."""
        try:
            await self._stores.call(write, is_write=True)
        except StoreUnavailable:
            if self._stores.fault is StoreFault.FULL:
                self._stores.memory_feed.remove(worker)
            raise
