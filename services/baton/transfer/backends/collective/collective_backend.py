"""Transfer backend over process groups: the owner sends the blocks that a reader has announced to read.

Each pair of reader and owner has one group. It is formed when the reader connects, over the stream of the
pair, and left with it. A group that fails is left; the next read forms another one.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from baton.core.errors import LayoutMismatch
from baton.core.ids import Incarnation, ReadId, WorkerRef
from baton.core.kv.kv_layout import KvLayout, KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.runtime.logging import get_logger
from baton.transfer.backend import (
    KvDescriptor,
    ReadServer,
    ReadState,
    SendGroup,
    drop_message,
)
from baton.transfer.backends.block_ranges import check_ids
from baton.transfer.backends.collective.group_server import JOIN_KEY, GroupServer
from baton.transfer.backends.collective.message_format import MessageFormat, MessageMemory
from baton.transfer.backends.collective.process_group import OWNER_RANK, READER_RANK, ProcessGroup
from baton.transfer.backends.collective.reading_group import GroupRead, ReadingGroup
from baton.transfer.backends.collective.rendezvous_store import MAX_VALUE_BYTES, RendezvousStore
from baton.transfer.backends.collective.serving_group import ServingGroup
from baton.transfer.backends.read_table import TrackedReads
from baton.transfer.integrity.generation_table import ENTRY_BYTES

log = get_logger(__name__)

TRANSFER = "collective"
KINDS = ("gloo", "nccl")
"""Names of the kinds of groups."""
MAX_GROUPS = 1024
"""Most groups in which a worker serves readers, including those that have not ended yet."""
RENDEZVOUS_S = 10.0
"""Longest time that a group may take to form."""
_CLOSE_S = 5.0
_TIER = "-tier"
"""End of the name of a second region."""


class GroupKind(Protocol):
    """Makes the process groups of a worker, and the messages in them.

    name: `gloo` or `nccl`; both workers of a pair must have the same
    memory_kind, device_id: of the blocks that messages are copied from and to
    """

    @property
    def name(self) -> str: ...

    @property
    def memory_kind(self) -> str: ...

    @property
    def device_id(self) -> int: ...

    @property
    def messages(self) -> MessageMemory: ...

    def open(self, store: RendezvousStore, rank: int) -> ProcessGroup:
        """Return a group that has not joined yet. The time limit of the store is that of joining."""
        ...

    def close(self) -> None:
        """Release what all groups share. Call it after the last group has ended."""
        ...


@dataclass(kw_only=True, eq=False)
class _Owner:
    """An owner that this worker reads from.

    send: on the present stream
    regions: agent names of its memory
    transport: kind of group; empty until one has formed
    """

    ref: WorkerRef
    send: SendGroup
    transport: str = ""
    regions: set[str] = field(default_factory=set)
    number: int = 0
    store: RendezvousStore | None = None
    group: ReadingGroup | None = None


class CollectiveBackend(TrackedReads):
    """Implements `TransferBackend`."""

    failure: BaseException | None = None

    def __init__(
        self,
        *,
        worker: WorkerRef,
        layout: KvLayout,
        kind: GroupKind,
        num_blocks: int,
        num_slots: int = 0,
        silence_s: float,
    ) -> None:
        """Takes over `kind` and closes it.

        num_slots: blocks of the second region; 0 if there is none
        silence_s: time after which a group ends in which nothing arrives
        """
        super().__init__()
        self.transfers = (TRANSFER,)
        self.num_blocks = num_blocks
        self._layout, self._kind, self._silence_s = layout, kind, silence_s
        self._format = MessageFormat.of(layout)
        self.max_probe_blocks = min(num_blocks, self._format.max_blocks)
        self._num_all_blocks = num_blocks + num_slots
        self._numbers = count(1)
        self._owners: dict[Incarnation, _Owner] = {}
        self._sources: dict[ReadId, KvDescriptor] = {}  # of reads that were not released
        self._is_closed = False
        self._serving: set[ServingGroup] = set()
        self._ending: set[ReadingGroup] = set()
        self._aborts = ThreadPoolExecutor(1, thread_name_prefix="kv-group-abort")
        name = f"{worker}-{secrets.token_hex(4)}"
        self.memory = tuple(
            self._described(worker, f"{name}{suffix}", size)
            for suffix, size in (("", num_blocks), (_TIER, num_slots))
            if size
        )

    # -- the reader's side -------------------------------------------------------------------------

    def is_two_sided(self, peer: KvMemory) -> bool:
        return True

    def connect(self, peer: KvMemory, layout: KvLayout, send: SendGroup = drop_message) -> None:
        mismatch = self._layout.mismatch(layout)
        if mismatch is not None:
            raise LayoutMismatch(mismatch)
        self._check_kind(peer)
        incarnation = peer.owner.incarnation
        owner = self._owners.setdefault(incarnation, _Owner(ref=peer.owner, send=send))
        owner.regions.add(peer.agent_name)
        if owner.send != send:  # a new stream: the owner has left the group with the old one
            owner.send = send
            self._leave(owner)
        if (owner.group is None or owner.group.has_ended) and not self._is_closed:
            self._join(owner)

    def forget(self, peer: KvMemory) -> None:
        owner = self._find(peer)
        if owner is None:
            return
        owner.regions.discard(peer.agent_name)
        if not owner.regions:
            del self._owners[owner.ref.incarnation]
            owner.send(GroupMessage(group=owner.number, key=""))
            self._leave(owner)

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        owner = self._find(peer)
        if owner is None or message.group != owner.number:
            return
        if not message.key:
            self._leave(owner)
        elif len(message.value) > MAX_VALUE_BYTES:
            problem = f"a value of {len(message.value)} bytes was published; must be at most {MAX_VALUE_BYTES}"
            log.warning("kv_group_ended", owner=str(owner.ref), problem=problem)
            owner.send(GroupMessage(group=owner.number, key=""))
            self._leave(owner)
        elif owner.store is not None:
            owner.store.deliver(message.key, message.value)

    def transport_to(self, peer: KvMemory) -> str:
        owner = self._find(peer)
        if owner is None:
            return ""
        if owner.group is not None and owner.group.has_joined:
            owner.transport = self._kind.name
        return owner.transport

    def describe(self, block_ids: Sequence[int]) -> KvDescriptor:
        check_ids(block_ids, self.num_blocks, "own")
        return KvDescriptor(memory=self.memory[0], block_ids=tuple(block_ids))

    def start_read(self, read_id: ReadId, source: KvDescriptor, block_ids: Sequence[int]) -> None:
        check_ids(block_ids, self.num_blocks, "own")
        if len(block_ids) != len(source.block_ids):
            raise ValueError(f"{len(source.block_ids)} source blocks for {len(block_ids)} own blocks")
        self._start(read_id, source, tuple(block_ids))

    def start_probe(self, read_id: ReadId, source: KvDescriptor) -> None:
        self._start(read_id, source, None)

    def start_read_generations(self, read_id: ReadId, source: KvDescriptor, payload: ReadId | None) -> None:
        check_ids(source.block_ids, source.memory.num_blocks, "the peer's")
        if payload is None or self._sources.get(payload) != source:
            raise ValueError(f"payload is {payload}; must be a read of the same blocks that is not released")
        self._reads.begin(read_id)
        if self._reads.poll(payload) is ReadState.DONE and self._find(source.memory) is not None:
            self._reads.end(read_id, ReadState.DONE, self._reads.generations(payload))
        else:
            self._reads.end(read_id, ReadState.LOST)

    def release(self, read_id: ReadId) -> None:
        super().release(read_id)  # with the entries that came with the blocks
        self._sources.pop(read_id, None)

    # -- the owner's side --------------------------------------------------------------------------

    def offer(self, block_ids: Sequence[int]) -> None:
        """Do nothing: blocks are copied when they are sent."""

    def serve(self, reader: WorkerRef, send: SendGroup) -> ReadServer:
        return GroupServer(
            reader,
            message_format=self._format,
            num_blocks=self._num_all_blocks,
            send=send,
            new_store=self._new_store,
            open_group=self._open_serving,
            end_group=self._end_serving,
        )

    async def aclose(self) -> None:
        """Wait up to 5 s for running reads, then end all groups and wait for their threads."""
        running = [asyncio.ensure_future(self._reads.wait(read_id)) for read_id in self._reads.running]
        if running:
            _done, late = await asyncio.wait(running, timeout=_CLOSE_S)
            for wait in late:
                wait.cancel()
        self._is_closed = True
        for owner in list(self._owners.values()):
            self._leave(owner)
        self._owners.clear()
        for group in list(self._serving):
            self._aborts.submit(group.close)
        groups: list[ServingGroup | ReadingGroup] = [*self._serving, *self._ending]
        await asyncio.to_thread(self._close_threads, groups)

    # -- internal ----------------------------------------------------------------------------------

    def _described(self, worker: WorkerRef, name: str, num_blocks: int) -> KvMemory:
        return KvMemory(
            owner=worker,
            agent_name=name,
            agent_metadata=self._kind.name.encode(),
            memory_kind=self._kind.memory_kind,
            device_id=self._kind.device_id,
            base_address=0,
            block_stride_bytes=self._layout.block_bytes,
            num_blocks=num_blocks,
            generation_table_address=0,
            generation_entry_bytes=ENTRY_BYTES,
            num_layers=self._layout.num_layers,
            transfer=TRANSFER,
        )

    def _check_kind(self, peer: KvMemory) -> None:
        """Raise LayoutMismatch if the peer has no groups of this kind."""
        kind = peer.agent_metadata.decode(errors="replace") if peer.transfer == TRANSFER else ""
        if kind == self._kind.name:
            return
        if kind not in KINDS:
            raise LayoutMismatch("transfer: the peer has no process groups; give both workers the same --transfer")
        raise LayoutMismatch(
            f"transfer: this worker has {self._kind.name}, the peer {kind}; NCCL needs GPUs on both sides, so use "
            "--gpu-kv staged if only one has a GPU"
        )

    def _find(self, peer: KvMemory) -> _Owner | None:
        """Return the owner of connected memory; None if it is not connected."""
        owner = self._owners.get(peer.owner.incarnation)
        return owner if owner is not None and peer.agent_name in owner.regions else None

    def _new_store(self, publish: Callable[[str, bytes], None]) -> RendezvousStore:
        """Return a store whose values are published on the event loop."""
        loop = asyncio.get_running_loop()

        def publish_on_loop(key: str, value: bytes) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(publish, key, value)

        return RendezvousStore(publish_on_loop, RENDEZVOUS_S)

    def _join(self, owner: _Owner) -> None:
        """Start to form a new group with an owner."""
        owner.number = next(self._numbers)
        send, number = owner.send, owner.number
        send(GroupMessage(group=number, key=JOIN_KEY))  # before the first read is announced
        owner.store = self._new_store(lambda key, value: send(GroupMessage(group=number, key=key, value=value)))
        owner.group = ReadingGroup(
            self._kind.open(owner.store, READER_RANK),
            self._kind.messages,
            name=str(owner.ref),
            silence_s=self._silence_s,
            on_read=lambda read, state, entries: self._reads.report(read.read_id, state, entries),
        )

    def _leave(self, owner: _Owner) -> None:
        group, owner.group, owner.store = owner.group, None, None
        if group is not None and not group.has_ended:
            self._ending = {each for each in self._ending if not each.has_ended} | {group}
            self._aborts.submit(group.close)

    def _start(self, read_id: ReadId, source: KvDescriptor, own: tuple[int, ...] | None) -> None:
        check_ids(source.block_ids, source.memory.num_blocks, "the peer's")
        if not 0 < len(source.block_ids) <= self._format.max_blocks:
            raise ValueError(f"a read has {len(source.block_ids)} blocks; must be 1 to {self._format.max_blocks}")
        self._reads.begin(read_id)
        self._sources[read_id] = source
        owner = self._find(source.memory)
        if owner is None or self._is_closed:
            self._reads.end(read_id, ReadState.FAILED)
            return
        read = GroupRead(read_id=read_id, num_blocks=len(source.block_ids), own=own)
        if owner.group is None or not owner.group.put(read):
            self._join(owner)
            if owner.group is None or not owner.group.put(read):
                self._reads.end(read_id, ReadState.FAILED)

    def _open_serving(self, reader: WorkerRef, store: RendezvousStore) -> ServingGroup | None:
        self._serving = {group for group in self._serving if not group.has_ended}
        if self._is_closed or len(self._serving) >= MAX_GROUPS:
            problem = "the worker is shutting down" if self._is_closed else f"{MAX_GROUPS} groups are served already"
            log.warning("kv_group_refused", reader=str(reader), problem=problem)
            return None
        group = ServingGroup(
            self._kind.open(store, OWNER_RANK),
            self._kind.messages,
            name=str(reader),
            silence_s=self._silence_s,
        )
        self._serving.add(group)
        return group

    def _end_serving(self, group: ServingGroup) -> None:
        if self._is_closed:
            group.close()
        else:
            self._aborts.submit(group.close)

    def _close_threads(self, groups: Sequence[ServingGroup | ReadingGroup]) -> None:
        self._aborts.shutdown(wait=True)
        ends_s = time.monotonic() + RENDEZVOUS_S + 1
        late = [group for group in groups if not group.join(max(0.0, ends_s - time.monotonic()))]
        if late:
            log.warning("kv_groups_not_ended", num_groups=len(late))
        else:
            self._kind.close()
