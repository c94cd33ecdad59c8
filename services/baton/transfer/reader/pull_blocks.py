"""Which blocks of one pull are announced, wait to be read, are being read, and have landed. Integers only: no
clock, no peer, no pool."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.messages.peer_messages import KvReady
from baton.transfer.integrity.validate_read import AnnouncedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Blocks that are read at once, and the own blocks that they land in, in that order."""

    blocks: tuple[AnnouncedBlock, ...]
    own: tuple[int, ...]


class PullBlocks:
    """Blocks by their index in the prompt's blocks. `expected`: the hashes of as many of them as are known
    here; `have_blocks`: so many leading ones need not be pulled."""

    def __init__(self, expected: Sequence[BlockHash], have_blocks: int) -> None:
        self.have_blocks = have_blocks
        self._expected = expected
        self._announced: dict[int, AnnouncedBlock] = {}
        self._receiving: dict[int, int] | None = None
        self._queue: deque[int] = deque()
        self._reading: set[int] = set()
        self._received: set[int] = set()

    @property
    def has_memory(self) -> bool:
        """Whether own blocks to land in were given."""
        return self._receiving is not None

    @property
    def any_announced(self) -> bool:
        return bool(self._announced)

    @property
    def any_waiting(self) -> bool:
        """Whether blocks wait to be read."""
        return bool(self._queue)

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    @property
    def num_received(self) -> int:
        return len(self._received)

    def problem(self, message: KvReady, num_owner_blocks: int) -> str:
        """What is wrong with an announcement, or empty. Nothing that a peer says is used as an index before
        this."""
        count, begin = len(message.block_ids), message.first_block_index
        if not count == len(message.generations) == len(message.hashes):
            return "block_ids, lives and hashes differ in number"
        if any(not 0 <= block_id < num_owner_blocks for block_id in message.block_ids):
            return "a block id is outside the owner's memory"
        expected = self._expected[begin : begin + count]
        if any(ours not in (theirs, NO_HASH) for ours, theirs in zip(expected, message.hashes, strict=False)):
            return "a hash is not that of the prompt's block"
        if self._receiving is not None and any(
            index >= self.have_blocks and index not in self._receiving for index in range(begin, begin + count)
        ):
            return "more blocks than the prompt has"
        return ""

    def announce(self, message: KvReady) -> None:
        """An announcement without a problem. It changes nothing for what is being read or has landed."""
        for offset, block_id in enumerate(message.block_ids):
            index = message.first_block_index + offset
            if index in self._received or index in self._reading:
                continue
            is_new = index not in self._announced
            self._announced[index] = AnnouncedBlock(
                index=index,
                block_id=block_id,
                generation=message.generations[offset],
                block_hash=message.hashes[offset],
            )
            if is_new and self._receiving is not None and index in self._receiving:
                self._queue.append(index)

    def first_unannounced(self) -> int:
        index = self.have_blocks
        while index in self._announced or index in self._received:
            index += 1
        return index

    def receive_into(self, receiving: Mapping[int, int], have_blocks: int) -> None:
        """Own blocks by index; what is announced of them waits to be read from now on."""
        self._receiving = dict(receiving)
        self.have_blocks = have_blocks
        self._queue.extend(index for index in sorted(self._announced) if index in self._receiving)

    def begin_read(self, max_blocks: int) -> Slice:
        """At most so many of those that wait."""
        receiving = self._receiving or {}
        blocks = tuple(self._announced[self._queue.popleft()] for _ in range(min(max_blocks, len(self._queue))))
        self._reading.update(block.index for block in blocks)
        return Slice(blocks=blocks, own=tuple(receiving[block.index] for block in blocks))

    def end_read(self, part: Slice) -> None:
        self._reading.difference_update(block.index for block in part.blocks)

    def received(self, block: AnnouncedBlock) -> None:
        """It was read, and what was read is proven."""
        self._received.add(block.index)

    def forget(self, part: Slice) -> None:
        """What was announced of these is not so: they must be announced again."""
        for block in part.blocks:
            del self._announced[block.index]

    def lose_memory(self, part: Slice) -> None:
        """What these were to land in is not the pull's any more."""
        if self._receiving is not None:
            for block in part.blocks:
                del self._receiving[block.index]

    def stop(self) -> list[int]:
        """Nothing more is to be read. Returns the own blocks that have not landed and that no read may
        write."""
        self._queue.clear()
        return [
            own
            for index, own in (self._receiving or {}).items()
            if index not in self._received and index not in self._reading
        ]

    def missing(self) -> dict[int, int]:
        """Own blocks that have not landed, by index."""
        return {index: own for index, own in (self._receiving or {}).items() if index not in self._received}
