"""Quarantines the destination blocks of reads that timed out or are in doubt until these reads are terminal.

A read cannot be cancelled. A slow owner may still write into the destination, so its blocks must not be
reused.
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.core.ids import ReadId
from baton.core.interfaces import ReceivingPool
from baton.runtime.logging import get_logger
from baton.transfer.backend import ReadState, TransferBackend

log = get_logger(__name__)


class Quarantine:
    """All reads of one reader that timed out or are in doubt.

    They outlive the pull and the link that started them.
    """

    def __init__(self, backend: TransferBackend, pool: ReceivingPool) -> None:
        self._backend, self._pool = backend, pool
        self._watchers: dict[asyncio.Task[None], None] = {}
        self.num_blocks = 0

    def watch(self, read_id: ReadId, own: Sequence[int], then: Callable[[ReadState], None]) -> None:
        """Quarantine `own` until the read is terminal, then release read and blocks and call `then`.

        `own` is empty for a read into scratch memory.
        """
        if own:
            self._pool.quarantine(own)
        self.num_blocks += len(own)
        watcher = asyncio.get_running_loop().create_task(self._watch(read_id, list(own), then))
        self._watchers[watcher] = None
        watcher.add_done_callback(self._watchers.pop)

    async def _watch(self, read_id: ReadId, own: list[int], then: Callable[[ReadState], None]) -> None:
        state = await self._backend.wait_ended(read_id)
        self._backend.release(read_id)
        self.num_blocks -= len(own)
        if own:
            self._pool.end_quarantine(own)
            log.info("kv_quarantine_ended", read_id=read_id, num_blocks=len(own), state=state.value)
        then(state)

    async def aclose(self) -> None:
        """Stop watching. Quarantined blocks stay quarantined."""
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
