"""The generation table: lets a reader detect that a block was reused while it was read."""

from typing import Any

from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.transfer.backend import GenerationEntry

ENTRY_BYTES = 32
"""generation u64, block_hash 16 bytes, worker_epoch u64, in the byte order of the host, like KV itself."""
_WORDS = ENTRY_BYTES // 8


class MemoryGenerationTable:
    """Implements `GenerationTable` in memory that peers may read at any time.

    Each of the four words of an entry is written by one aligned store, the generation first. A concurrent
    reader therefore sees the announced generation or a different one, never a mixture that happens to be
    equal.
    """

    __slots__ = ("_hashes", "_words", "num_blocks")

    def __init__(self, buffer: Any, worker_epoch: int) -> None:
        """Use `buffer` (writable, 32 bytes per block, 8-byte aligned) and write `worker_epoch` into every
        entry.

        Existing generations and hashes stay.
        """
        view = memoryview(buffer).cast("B")
        self.num_blocks = len(view) // ENTRY_BYTES
        self._hashes = view
        self._words = view.cast("Q")
        for block_id in range(self.num_blocks):
            self._words[block_id * _WORDS + 3] = worker_epoch

    def begin_generation(self, block_id: int) -> int:
        """Increment the block's generation and clear its hash. Call it before the block is written.

        Returns the new generation.
        """
        first = self._first_word(block_id)
        generation = self._words[first] + 1
        self._words[first] = generation
        self._words[first + 1] = 0
        self._words[first + 2] = 0
        return generation

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """Set the hash of a block whose content is final."""
        if len(block_hash) != HASH_BYTES:
            raise ValueError(f"the block hash has {len(block_hash)} bytes; must be {HASH_BYTES}")
        begin = self._first_word(block_id) * 8 + 8
        self._hashes[begin : begin + HASH_BYTES] = block_hash

    def generation(self, block_id: int) -> int:
        """Return the current generation of a block."""
        return self._words[self._first_word(block_id)]

    def block_hash(self, block_id: int) -> BlockHash:
        """Return the hash of a block, or NO_HASH while its content is not final."""
        begin = self._first_word(block_id) * 8 + 8
        return bytes(self._hashes[begin : begin + HASH_BYTES])

    def entry(self, block_id: int) -> GenerationEntry:
        """Return the whole entry of a block."""
        begin = self._first_word(block_id) * 8
        return decode_entries(bytes(self._hashes[begin : begin + ENTRY_BYTES]))[0]

    def close(self) -> None:
        """Release the buffer. The table cannot be used afterwards."""
        self._words.release()
        self._hashes.release()

    def _first_word(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block_id is {block_id}; must be below {self.num_blocks}")
        return block_id * _WORDS


def decode_entries(data: bytes | memoryview) -> tuple[GenerationEntry, ...]:
    """Decode consecutive entries; the size of `data` must be a multiple of 32 bytes."""
    words = memoryview(data).cast("B").cast("Q")
    raw = bytes(data)
    return tuple(
        GenerationEntry(
            generation=words[i * _WORDS],
            block_hash=raw[i * ENTRY_BYTES + 8 : i * ENTRY_BYTES + 24],
            worker_epoch=words[i * _WORDS + 3],
        )
        for i in range(len(raw) // ENTRY_BYTES)
    )
