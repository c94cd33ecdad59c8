"""The generation table: what a reader checks after a read, so that a block that was reused meanwhile is never
taken for what it was."""

from typing import Any

from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.transfer.backend import GenerationEntry

ENTRY_BYTES = 32
"""life u64, block_hash 16 bytes, worker_epoch u64; in the byte order of the host, which `KvLayout`'s dtypes
share."""
_WORDS = ENTRY_BYTES // 8


class MemoryGenerationTable:
    """`GenerationTable` over memory that peers may read at any moment. Each of an entry's four words is
    written by one aligned store, life first, so a reader sees either the life that was announced to it or
    another one, never a mixture of two that happens to be equal."""

    __slots__ = ("_hashes", "_words", "num_blocks")

    def __init__(self, buffer: Any, worker_epoch: int) -> None:
        """Lay the table over `buffer` (writable, 32 bytes a block, 8-byte aligned) and write `worker_epoch`
        into every entry. Lives and hashes that stand there already are kept."""
        view = memoryview(buffer).cast("B")
        self.num_blocks = len(view) // ENTRY_BYTES
        self._hashes = view
        self._words = view.cast("Q")
        for block_id in range(self.num_blocks):
            self._words[block_id * _WORDS + 3] = worker_epoch

    def begin_generation(self, block_id: int) -> int:
        """Bump the block's life and clear its hash, before anyone may write the block. Returns the new
        life."""
        first = self._first_word(block_id)
        generation = self._words[first] + 1
        self._words[first] = generation
        self._words[first + 1] = 0
        self._words[first + 2] = 0
        return generation

    def set_hash(self, block_id: int, block_hash: BlockHash) -> None:
        """The block's content is final."""
        if len(block_hash) != HASH_BYTES:
            raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {len(block_hash)}")
        begin = self._first_word(block_id) * 8 + 8
        self._hashes[begin : begin + HASH_BYTES] = block_hash

    def generation(self, block_id: int) -> int:
        return self._words[self._first_word(block_id)]

    def block_hash(self, block_id: int) -> BlockHash:
        """NO_HASH while the block's content is not final."""
        begin = self._first_word(block_id) * 8 + 8
        return bytes(self._hashes[begin : begin + HASH_BYTES])

    def entry(self, block_id: int) -> GenerationEntry:
        begin = self._first_word(block_id) * 8
        return decode_entries(bytes(self._hashes[begin : begin + ENTRY_BYTES]))[0]

    def close(self) -> None:
        """Let go of the buffer; the table cannot be used afterwards."""
        self._words.release()
        self._hashes.release()

    def _first_word(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        return block_id * _WORDS


def decode_entries(data: bytes | memoryview) -> tuple[GenerationEntry, ...]:
    """Entries as they lie one after the other in `data` (a whole number of them)."""
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
