"""Process groups of simulated two-sided reads: a read is copied once its owner has granted it.

A group belongs to one reader, one owner and one stream between them, as in `transfer.backends.collective`.
Its reads are answered one after the other, in the order of their starts.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from baton.core.ids import ReadId
from baton.sim.sim_streams import start_in_network
from baton.transfer.backend import GenerationEntry, KvDescriptor, ReadState

Destinations = Sequence[int | None]
"""Own blocks that a read fills; None for blocks of a probe, which are dropped."""
Entries = tuple[GenerationEntry, ...]
CopyBlocks = Callable[[KvDescriptor, Destinations], Coroutine[Any, Any, Entries | None]]
"""Copies blocks and returns their entries as they are afterwards; None if the transport has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRead:
    """A read as its reader has started it. ended: its terminal state."""

    read_id: ReadId
    source: KvDescriptor
    destinations: Destinations
    ended: asyncio.Future[ReadState]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGrant:
    """The owner's answer to a read. source: what it sends; None if it refuses the read."""

    read_id: ReadId
    num_blocks: int
    source: KvDescriptor | None


class SimGroups:
    """The groups of a cluster that have not ended, by number. Later ones have larger numbers."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._groups: dict[int, SimGroup] = {}

    def add(self, group: "SimGroup") -> int:
        """Add a new group and return its number."""
        number = next(self._numbers)
        self._groups[number] = group
        return number

    def remove(self, group: "SimGroup") -> None:
        """Remove a group that has ended."""
        del self._groups[group.number]

    def find(self, number: int, *, owner: str) -> "SimGroup | None":
        """Return a group by its number, if `owner` is its owner."""
        group = self._groups.get(number)
        return group if group is not None and group.owner == owner else None

    def kill(self, agent_name: str) -> None:
        """End all groups of a process that has died."""
        for group in list(self._groups.values()):
            if group.reader == agent_name:
                group.leave()
            elif group.owner == agent_name:
                group.owner_left()


class SimGroup:
    """The group of one pair of workers, for as long as their stream lives.

    It fails if an answer does not belong to the read that is next, or if a copy fails: all its reads that
    have not ended are then FAILED. If one side leaves it they are LOST, as is a read that the owner refuses.
    Nothing is written for them afterwards. Unlike a real group, it waits without a limit for an owner that
    does not answer: the storm then finds the read.
    """

    def __init__(
        self,
        groups: SimGroups,
        *,
        reader: str,
        owner: str,
        copy_blocks: CopyBlocks,
        passable: Callable[[], Coroutine[Any, Any, None]],
        on_done: Callable[[GroupedRead, Entries], None],
    ) -> None:
        """reader, owner: agent names.

        passable: waits until bytes pass between the two
        on_done: called with the entries of each read that is DONE
        """
        self.number = groups.add(self)
        self.reader, self.owner = reader, owner
        self.has_ended = False
        self._copy_blocks, self._passable = copy_blocks, passable
        self._groups, self._on_done = groups, on_done
        self._is_joined = False
        self._reads: deque[GroupedRead] = deque()
        self._grants: deque[ReadGrant] = deque()
        self._answering: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The tasks of the group, some of which may have ended."""
        return tuple(task for task in (self._answering, self._ending) if task is not None)

    def put(self, read: GroupedRead) -> None:
        """Add a read. Called at the reader, while the group has not ended."""
        self._reads.append(read)
        self._proceed()

    def join(self) -> None:
        """Let copies begin, because both sides have joined. Called at the reader."""
        self._is_joined = True
        self._proceed()

    def grant(self, grant: ReadGrant) -> None:
        """Add an answer. It is lost if a side has left the group. Called at the owner."""
        if not self.has_ended and self._ending is None:
            self._grants.append(grant)
            self._proceed()

    def owner_left(self) -> None:
        """Stop to send. The group ends as soon as the reader can notice that."""
        if self.has_ended or self._ending is not None:
            return
        self._grants.clear()
        if self._answering is not None:
            self._answering.cancel()
        self._ending = start_in_network(self._leave_when_noticed())

    def leave(self) -> None:
        """End the group at the reader: all its reads are LOST, and their copies stop."""
        self._end(ReadState.LOST)

    async def _leave_when_noticed(self) -> None:
        await self._passable()
        self.leave()

    def _end(self, state: ReadState) -> None:
        """End the group, and all its reads in this state."""
        if self.has_ended:
            return
        self.has_ended = True
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()  # it runs no further, so it writes nothing
        for read in self._reads:
            read.ended.set_result(state)
        self._reads.clear()
        self._groups.remove(self)

    def _proceed(self) -> None:
        """Start to answer the next read, if the owner has granted one and no other is being answered."""
        if self._is_joined and self._answering is None and self._reads and self._grants:
            self._answering = start_in_network(self._answer(self._reads[0], self._grants.popleft()))

    async def _answer(self, read: GroupedRead, grant: ReadGrant) -> None:
        await self._passable()
        entries: Entries | None = None
        has_failed = grant.read_id != read.read_id or grant.num_blocks != len(read.destinations)
        if grant.source is not None and not has_failed:
            try:
                entries = await self._copy_blocks(grant.source, read.destinations)
            except Exception as error:  # a fault of the simulation, which the reader raises
                self._reads.popleft()
                read.ended.set_exception(error)
            has_failed = entries is None
        if has_failed:
            self._end(ReadState.FAILED)
            return
        self._reads.popleft()
        self._answering = None
        if entries is not None:
            self._on_done(read, entries)
        read.ended.set_result(ReadState.LOST if entries is None else ReadState.DONE)
        self._proceed()
