"""`StagedBlocks`: reads and writes device blocks as bytes, through a staging buffer and in a thread."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from baton.core.kv.block_hash import BlockHash
from baton.transfer.backends.host_memory import Bytes, anonymous
from baton.worker.prefix_files.prefix_format import RECORD_BYTES, encode_record, is_intact
from baton.worker.tiers.running_calls import MAX_STOP_S, RunningCalls
from baton.worker.tiers.tier_copies import CopyRunner, TierCopies

STAGING_BYTES = 2 << 20
"""Host memory of the staging buffer. It holds at least one block."""
MAX_ROWS = 64


class StagedBlocks:
    """Copies blocks between the device and records of a file. Used from one event loop.

    num_rows: most blocks of one call
    """

    def __init__(self, block_bytes: int, copies_to: Callable[[Bytes], TierCopies], runner: CopyRunner) -> None:
        """`copies_to`: returns copies between the device and a staging buffer, which is allocated when it is
        used first. Takes ownership of `runner`."""
        self.num_rows = max(1, min(MAX_ROWS, STAGING_BYTES // block_bytes))
        self._block_bytes = block_bytes
        self._copies_to, self._runner = copies_to, runner
        self._staging: Bytes | None = None
        self._copies: TierCopies | None = None
        self._calls = RunningCalls()

    async def read(self, blocks: Mapping[int, BlockHash]) -> list[bytes]:
        """Return the records of device blocks, by block id. They must be pinned until this ends.

        A cancelled caller waits for the copy, because it cannot be stopped.
        """
        records: list[bytes] = []
        copy = partial(self._read, blocks, records)
        await self._calls.to_its_end(self._runner.run(copy, len(blocks) * self._block_bytes))
        return records

    async def write(
        self, block_ids: Sequence[int | None], hashes: Sequence[BlockHash], records: Sequence[bytes]
    ) -> int:
        """Verify records, and copy them to device blocks. Returns how many leading ones are good.

        Nothing is copied if one is not good. The blocks must be receiving until this ends. Otherwise as
        `read`.
        block_ids: where each record is copied to; None: nowhere
        """
        num_good: list[int] = []
        copy = partial(self._write, block_ids, hashes, records, num_good)
        await self._calls.to_its_end(self._runner.run(copy, len(block_ids) * self._block_bytes))
        return num_good[0]

    async def aclose(self) -> None:
        """Wait for the running copy, at most `MAX_STOP_S`. A device that does not answer is not closed."""
        if not await self._calls.ended(MAX_STOP_S):
            return
        self._runner.close()
        if self._copies is not None:
            self._copies.close()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _read(self, blocks: Mapping[int, BlockHash], records: list[bytes]) -> None:
        staging, copies = self._opened()
        copies.to_host(list(blocks), range(len(blocks)))
        records += [encode_record(block_hash, staging[row].tobytes()) for row, block_hash in enumerate(blocks.values())]

    def _write(
        self,
        block_ids: Sequence[int | None],
        hashes: Sequence[BlockHash],
        records: Sequence[bytes],
        num_good: list[int],
    ) -> None:
        staging, copies = self._opened()
        checks = (is_intact(record, block_hash) for record, block_hash in zip(records, hashes, strict=True))
        num_good.append(sum(1 for _ in takewhile(bool, checks)))
        wanted = {block_id: record for block_id, record in zip(block_ids, records, strict=True) if block_id is not None}
        if not wanted or num_good[0] < len(records):
            return
        for row, record in enumerate(wanted.values()):
            staging[row] = np.frombuffer(record, dtype=np.uint8, offset=RECORD_BYTES)
        copies.to_device(range(len(wanted)), list(wanted))

    def _opened(self) -> tuple[Bytes, TierCopies]:
        if self._staging is None or self._copies is None:
            memory = anonymous(self.num_rows * self._block_bytes)
            self._staging = np.frombuffer(memory, dtype=np.uint8).reshape(self.num_rows, -1)
            self._copies = self._copies_to(self._staging)
        return self._staging, self._copies
