"""Both sides of simulated two-sided reads: the reader forms the groups, the owner grants reads in them."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.core.ids import Incarnation, ReadId, WorkerRef
from baton.core.kv.kv_layout import KvMemory
from baton.core.messages.peer_messages import GroupMessage
from baton.sim.sim_groups import CopyBlocks, Entries, GroupedRead, ReadGrant, SimGroup, SimGroups
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState, SendGroup

_JOIN, _JOINED = "join", "joined"
"""Keys of the two messages that form a group. An empty key ends it."""


def agent_name_of(worker: WorkerRef) -> str:
    """Return the name of a worker on the fabric."""
    return f"sim-{worker}"


@dataclass(kw_only=True, eq=False)
class _GroupOwner:
    """An owner that this worker reads from.

    send: sends a message on the present stream
    entries: those of the blocks that were read last, by agent name and block id
    """

    worker: WorkerRef
    send: SendGroup
    regions: set[str] = field(default_factory=set)
    entries: dict[tuple[str, int], GenerationEntry] = field(default_factory=dict)
    group: SimGroup | None = None


class SimGroupReader:
    """The reader's side of the two-sided reads of one worker. There is at most one group for each owner."""

    def __init__(
        self,
        worker: WorkerRef,
        groups: SimGroups,
        *,
        copy_blocks: CopyBlocks,
        passable: Callable[[WorkerRef], Coroutine[Any, Any, None]],
    ) -> None:
        """`passable`: waits until bytes pass between this worker and an owner."""
        self._name, self._groups = agent_name_of(worker), groups
        self._copy_blocks, self._passable = copy_blocks, passable
        self._owners: dict[Incarnation, _GroupOwner] = {}

    def connect(self, peer: KvMemory, send: SendGroup) -> None:
        """Form a group with an owner, unless there is one on this stream."""
        owner = self._owners.setdefault(peer.owner.incarnation, _GroupOwner(worker=peer.owner, send=send))
        owner.regions.add(peer.agent_name)
        if owner.send != send and owner.group is not None:  # a new stream: the group has ended with the old one
            owner.group.leave()
        owner.send = send
        if owner.group is None or owner.group.has_ended:
            self._join(owner)

    def forget(self, peer: KvMemory) -> None:
        """Leave the group after the last region of an owner was forgotten."""
        owner = self._owners.get(peer.owner.incarnation)
        if owner is None:
            return
        owner.regions.discard(peer.agent_name)
        if owner.regions:
            return
        del self._owners[peer.owner.incarnation]
        if owner.group is not None and not owner.group.has_ended:
            owner.send(GroupMessage(group=owner.group.number, key=""))
            owner.group.leave()

    def receive(self, peer: KvMemory, message: GroupMessage) -> None:
        """Handle a message of the owner. One of a group that has ended is dropped."""
        owner = self._owners.get(peer.owner.incarnation)
        group = owner.group if owner is not None else None
        if group is None or group.has_ended or message.group != group.number:
            return
        if message.key:
            group.join()
        else:
            group.leave()

    def start(self, read: GroupedRead) -> None:
        """Start a read in the group of its owner, or in a new one if that has ended."""
        owner = self._owners.get(read.source.memory.owner.incarnation)
        if owner is None or read.source.memory.agent_name not in owner.regions:
            read.ended.set_result(ReadState.FAILED)
            return
        group = owner.group
        if group is None or group.has_ended:
            group = self._join(owner)
        group.put(read)

    def entries(self, source: KvDescriptor) -> Entries | None:
        """Return the entries that the last read of each block has brought; None if one was never read."""
        owner, name = self._owners.get(source.memory.owner.incarnation), source.memory.agent_name
        known = {} if owner is None else owner.entries
        entries = tuple(known[name, block_id] for block_id in source.block_ids if (name, block_id) in known)
        return entries if len(entries) == len(source.block_ids) else None

    def close(self) -> list[asyncio.Task[None]]:
        """Leave all groups. Returns the tasks to wait for."""
        groups = [owner.group for owner in self._owners.values() if owner.group is not None]
        for group in groups:
            group.leave()
        self._owners.clear()
        return [task for group in groups for task in group.tasks]

    def _join(self, owner: _GroupOwner) -> SimGroup:
        """Start to form a new group. The message arrives before those that announce reads in it."""
        group = owner.group = SimGroup(
            self._groups,
            reader=self._name,
            owner=agent_name_of(owner.worker),
            copy_blocks=self._copy_blocks,
            passable=partial(self._passable, owner.worker),
            on_done=partial(_keep, owner),
        )
        owner.send(GroupMessage(group=group.number, key=_JOIN))
        return group


def _keep(owner: _GroupOwner, read: GroupedRead, entries: Entries) -> None:
    """Keep the entries of a read."""
    name = read.source.memory.agent_name
    for block_id, entry in zip(read.source.block_ids, entries, strict=True):
        owner.entries[name, block_id] = entry


class SimReadServer:
    """Implements `ReadServer`: grants the reads of one reader in the group that it has formed last."""

    def __init__(self, groups: SimGroups, regions: Sequence[KvMemory], send: SendGroup) -> None:
        """`regions`: of the owner, in the order of announcements."""
        self._groups, self._regions, self._send = groups, tuple(regions), send
        self._number = 0
        self._group: SimGroup | None = None
        self._is_closed = False

    def receive(self, message: GroupMessage) -> None:
        if self._is_closed or message.group < self._number:
            return  # of a group that has ended
        if message.group > self._number:
            self._leave()
            self._number = message.group
            if message.key:
                self._join(message.group)
        if not message.key:
            self._leave()

    def expect_read(self, read_id: ReadId, block_ids: Sequence[int]) -> None:
        self._answer(ReadGrant(read_id=read_id, num_blocks=len(block_ids), source=self._source_of(block_ids)))

    def refuse_read(self, read_id: ReadId, num_blocks: int) -> None:
        self._answer(ReadGrant(read_id=read_id, num_blocks=num_blocks, source=None))

    def close(self) -> None:
        self._is_closed = True
        self._leave()

    def _join(self, number: int) -> None:
        self._group = self._groups.find(number, owner=self._regions[0].agent_name)
        if self._group is not None:
            self._send(GroupMessage(group=number, key=_JOINED))

    def _answer(self, grant: ReadGrant) -> None:
        if self._group is not None:  # else the reader's side has ended, too
            self._group.grant(grant)

    def _source_of(self, block_ids: Sequence[int]) -> KvDescriptor | None:
        """Return where blocks are, which must be of one region; None if they are nowhere."""
        begin = 0
        for memory in self._regions:
            end = begin + memory.num_blocks
            if block_ids and all(begin <= block_id < end for block_id in block_ids):
                return KvDescriptor(memory=memory, block_ids=tuple(block_id - begin for block_id in block_ids))
            begin = end
        return None

    def _leave(self) -> None:
        if self._group is not None:
            self._group.owner_left()
        self._group = None
