"""Messages of NCCL: blocks in the memory of a GPU. Not verified: no GPU has run it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from baton.core.kv.kv_layout import KvLayout
from baton.transfer.backend import GenerationEntry
from baton.transfer.backends.collective.message_format import HEADER_BYTES, MessageFormat, MessageHeader
from baton.transfer.backends.host_memory import Bytes, HostMemory
from baton.transfer.integrity.generation_table import ENTRY_BYTES, decode_entries


class GpuMessages:
    """Implements `MessageMemory` over the KV cache of a GPU. Works on any device of torch, for tests.

    Header and entries are in host memory, and are copied to and from the GPU with each message. Each thread
    has a stream of its own for copies, which have ended when a method returns.
    """

    def __init__(
        self, layout: KvLayout, kv: torch.Tensor, generation_table: Bytes, tier: HostMemory | None = None
    ) -> None:
        """kv: the blocks, uint8 [num_blocks, block_bytes].

        generation_table: their entries, [num_blocks * 32] uint8 in host memory
        tier: a second region that peers may read, in host memory
        """
        self._format = MessageFormat.of(layout)
        self._kv = kv
        self._table = generation_table.reshape(-1, ENTRY_BYTES)
        self._tier = tier
        self._threads = threading.local()

    def new_buffer(self) -> torch.Tensor:
        return torch.empty(self._format.max_bytes, dtype=torch.uint8, device=self._kv.device)

    def pack(self, buffer: torch.Tensor, header: MessageHeader, block_ids: tuple[int, ...]) -> torch.Tensor:
        num_blocks, begin = header.num_blocks, self._format.blocks_at(header.num_blocks)
        blocks = buffer[begin : begin + num_blocks * self._format.block_bytes].view(num_blocks, -1)
        with self._copies():
            if not block_ids:
                blocks.zero_()  # NCCL sends them, too
            elif max(block_ids) < len(self._kv):
                torch.index_select(self._kv, 0, torch.tensor(block_ids, device=self._kv.device), out=blocks)
            else:
                for number, block_id in enumerate(block_ids):
                    blocks[number].copy_(self._block(block_id))
        with self._copies():  # the entries are read after the copies of the blocks have ended
            start = np.zeros(begin, dtype=np.uint8)  # with the zeros between entries and blocks
            written = header.encode() + self._entries(block_ids)
            start[: len(written)] = np.frombuffer(written, dtype=np.uint8)
            buffer[:begin].copy_(torch.from_numpy(start))
        return buffer[: self._format.num_bytes(num_blocks)]

    def expected(self, buffer: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the part of exactly the message's size, which NCCL must know."""
        return buffer[: self._format.num_bytes(num_blocks)]

    def header(self, buffer: torch.Tensor) -> MessageHeader:
        with self._copies():
            return MessageHeader.decode(buffer[:HEADER_BYTES].cpu().numpy().tobytes())

    def unpack(self, buffer: torch.Tensor, num_blocks: int, own: tuple[int, ...] | None) -> tuple[GenerationEntry, ...]:
        begin, size = self._format.blocks_at(num_blocks), self._format.block_bytes
        with self._copies():
            entries = buffer[HEADER_BYTES : HEADER_BYTES + num_blocks * ENTRY_BYTES].cpu().numpy().tobytes()
            if own is not None:
                ids = torch.tensor(own, device=self._kv.device)
                self._kv.index_copy_(0, ids, buffer[begin : begin + num_blocks * size].view(num_blocks, size))
        return decode_entries(entries)

    def _block(self, block_id: int) -> torch.Tensor:
        if block_id < len(self._kv):
            return self._kv[block_id]
        assert self._tier is not None
        return torch.from_numpy(self._tier.kv[block_id - len(self._kv)])

    def _entries(self, block_ids: Sequence[int]) -> bytes:
        rows = [
            self._table[each] if each < len(self._table) else self._tier_entry(each - len(self._table))
            for each in block_ids
        ]
        return np.concatenate(rows).tobytes() if rows else b""

    def _tier_entry(self, slot: int) -> Bytes:
        assert self._tier is not None
        return self._tier.generation_table.reshape(-1, ENTRY_BYTES)[slot]

    @contextmanager
    def _copies(self) -> Iterator[None]:
        """Run copies on the thread's own stream, and wait for their end."""
        if self._kv.device.type != "cuda":
            yield
            return
        stream = getattr(self._threads, "stream", None)
        if stream is None:
            stream = self._threads.stream = torch.cuda.Stream(self._kv.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
