"""Messages of Gloo: blocks in host memory."""

from typing import Any

import numpy as np
import torch

from baton.core.kv.kv_layout import KvLayout
from baton.transfer.backend import GenerationEntry
from baton.transfer.backends.block_ranges import runs
from baton.transfer.backends.collective.message_format import HEADER_BYTES, MessageFormat, MessageHeader
from baton.transfer.backends.host_memory import Bytes, HostMemory
from baton.transfer.integrity.generation_table import ENTRY_BYTES, decode_entries


class HostMessages:
    """Implements `MessageMemory` over host memory. Buffers are tensors, because Gloo takes those."""

    def __init__(self, layout: KvLayout, memory: HostMemory, tier: HostMemory | None = None) -> None:
        """`tier`: a second region that peers may read."""
        self._format = MessageFormat.of(layout)
        self._own = memory.kv
        regions = (memory,) if tier is None else (memory, tier)
        self._regions = [(region.kv, region.generation_table.reshape(-1, ENTRY_BYTES)) for region in regions]

    def new_buffer(self) -> torch.Tensor:
        return torch.empty(self._format.max_bytes, dtype=torch.uint8)

    def pack(self, buffer: torch.Tensor, header: MessageHeader, block_ids: tuple[int, ...]) -> torch.Tensor:
        message: Bytes = buffer.numpy()
        message[:HEADER_BYTES] = np.frombuffer(header.encode(), dtype=np.uint8)
        if not block_ids:
            return buffer[:HEADER_BYTES]  # the reader learns it from the header: Gloo takes shorter messages
        begin, entries_end = self._format.blocks_at(header.num_blocks), HEADER_BYTES + header.num_blocks * ENTRY_BYTES
        blocks = message[begin : begin + header.num_blocks * self._format.block_bytes].reshape(header.num_blocks, -1)
        entries = message[HEADER_BYTES:entries_end].reshape(-1, ENTRY_BYTES)
        message[entries_end:begin] = 0
        for copied, part in ((blocks, 0), (entries, 1)):  # all blocks before the first entry
            self._gather(copied, part, block_ids)
        return buffer[: self._format.num_bytes(header.num_blocks)]

    def expected(self, buffer: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Return the whole buffer: Gloo ends the process if a message is larger than where it goes."""
        return buffer

    def header(self, buffer: torch.Tensor) -> MessageHeader:
        return MessageHeader.decode(buffer[:HEADER_BYTES].numpy().tobytes())

    def unpack(self, buffer: torch.Tensor, num_blocks: int, own: tuple[int, ...] | None) -> tuple[GenerationEntry, ...]:
        message: Bytes = buffer.numpy()
        begin, size = self._format.blocks_at(num_blocks), self._format.block_bytes
        if own is not None:
            blocks = message[begin : begin + num_blocks * size].reshape(num_blocks, size)
            for run in runs(range(num_blocks), own):  # numpy releases the GIL during each copy
                np.copyto(
                    self._own[run.own : run.own + run.num_blocks], blocks[run.source : run.source + run.num_blocks]
                )
        return decode_entries(message[HEADER_BYTES : HEADER_BYTES + num_blocks * ENTRY_BYTES].tobytes())

    def _gather(self, into: Any, part: int, block_ids: tuple[int, ...]) -> None:
        """Copy the rows of blocks. `part`: 0 for blocks, 1 for generation-table entries."""
        first = self._regions[0][part]
        for run in runs(block_ids, range(len(block_ids))):
            source, begin, end = first, run.source, run.source + run.num_blocks
            if begin >= len(first):
                source, begin, end = self._regions[1][part], begin - len(first), end - len(first)
            elif end > len(first):  # a run that crosses from one region into the other
                split = len(first) - begin
                np.copyto(into[run.own : run.own + split], first[begin:])
                np.copyto(into[run.own + split : run.own + run.num_blocks], self._regions[1][part][: end - len(first)])
                continue
            np.copyto(into[run.own : run.own + run.num_blocks], source[begin:end])
