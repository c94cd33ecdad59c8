"""Pulls leading blocks of prompts from workers that hold them into this worker's prefix cache, where that was said to be faster than to
compute them. Whatever goes wrong, the blocks are computed: what is pulled is only ever cache.
"""

import asyncio
from collections.abc import Callable, Sequence

from baton.core.blocks import BlockHash
from baton.core.costs import StepCostModel
from baton.core.errors import Failure, Refused
from baton.core.jobs import PrefixSource
from baton.core.peer import HashRange
from baton.engine.engine import Engine
from baton.runtime.logging import get_logger
from baton.transfer.puller import Pull
from baton.transfer.reader import KvReader

log = get_logger(__name__)

MAX_PULLED_SHARE = 0.25
"""Of this worker's KV memory: the bytes of prefixes that may be on their way to it at once."""
MAX_TIMES_COMPUTING = 2.0
"""A pull is given up when it has taken so many times as long as computing the same blocks would, alone on the device..."""
MIN_PULL_S = 0.25
"""... but it may always take so long: a pair that was not used for a while is dialled first."""
MAX_PULL_S = 10.0
PULL_S = 2.0
"""As long as that where this worker does not know what computing costs."""


class PrefixPuller:
    """All prefix pulls of one worker. Single owner: its event loop."""

    def __init__(self, *, engine: Engine, reader: KvReader, block_bytes: int, costs: Callable[[], StepCostModel | None]) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._reader = reader
        self._costs = costs
        self._block_bytes = block_bytes
        self._budget_bytes = max(block_bytes, int(MAX_PULLED_SHARE * engine.pool.num_blocks * block_bytes))
        self._pulled_bytes = 0
        self._under_way: dict[BlockHash, asyncio.Event] = {}
        """By the first block that it brings: set when that pull has ended."""

    async def bring(self, source: PrefixSource, hashes: Sequence[BlockHash], *, cache_salt: bytes = b"") -> None:
        """Return when the blocks of these `hashes` (a prompt's leading ones) that could be had are in the pool's cache, or when it would
        take too long. Where another pull brings them, that one is waited for."""
        wanted = tuple(hashes[: source.num_blocks])
        seconds = self._limit_s(wanted)
        try:
            async with asyncio.timeout(seconds):
                while (same := self._pull_of(wanted)) is not None:
                    await same.wait()
                await self._pull(source, HashRange(hashes=wanted, cache_salt=cache_salt))
        except TimeoutError:
            log.info("prefix_pull_given_up", source=str(source.worker), num_blocks=len(wanted), seconds=seconds)
        except Refused as refused:
            _say_failed(source, refused.failure)
        except Exception:  # a bug of ours: it costs the time to compute, no request
            log.exception("prefix_pull_failed", source=str(source.worker))

    def _pull_of(self, wanted: Sequence[BlockHash]) -> asyncio.Event | None:
        num_held = self._pool.count_cached(wanted)
        return self._under_way.get(wanted[num_held]) if num_held < len(wanted) else None

    async def _pull(self, source: PrefixSource, wanted: HashRange) -> None:
        """Raises Refused when the pull fails; what had landed until then stays."""
        held = self._pool.match(wanted.hashes, len(wanted.hashes))  # a chain is of no use without its beginning
        reserved_bytes, first_missing = 0, None
        try:
            num_missing = min(len(wanted.hashes) - len(held), (self._budget_bytes - self._pulled_bytes) // self._block_bytes)
            if num_missing <= 0:
                return
            reserved_bytes, first_missing = num_missing * self._block_bytes, wanted.hashes[len(held)]
            self._pulled_bytes += reserved_bytes
            self._under_way[first_missing] = asyncio.Event()
            asked = HashRange(hashes=wanted.hashes[: len(held) + num_missing], cache_salt=wanted.cache_salt)
            pull = self._reader.pull(source.worker, asked, have_blocks=len(held))
            try:
                await self._land(pull, len(held), num_missing)
            finally:
                pull.cancel()
        finally:
            self._pool.unref(held)
            self._pulled_bytes -= reserved_bytes
            if first_missing is not None:
                self._under_way.pop(first_missing).set()

    async def _land(self, pull: Pull, num_held: int, num_missing: int) -> None:
        """Once the holder has said what it has, take room for that and no more, and fill it."""
        await pull.announced()
        final = pull.final
        num_there = 0 if final is None else min(num_missing, final.first_block_index + len(final.block_ids) - num_held)
        landing = self._pool.allocate_landing(num_there) if 0 < num_there <= self._room() else None
        if landing is None:
            log.info("prefix_not_pulled", num_blocks=num_there, room=self._room())
            return
        try:
            pull.land_into(dict(enumerate(landing, num_held)), num_held)
            result = await pull.done()
            log.info("prefix_pulled", num_blocks=result.num_blocks, transfer_bytes=result.transfer_bytes, transfer_s=result.kv_transfer_s)
        finally:
            self._pool.unref(landing)  # what has landed is cache now; what has not is the pull's until its read has ended

    def _room(self) -> int:
        """Every running sequence keeps one block that it may need soon."""
        return self._pool.num_allocatable - self._engine.running_seqs

    def _limit_s(self, wanted: Sequence[BlockHash]) -> float:
        costs, block_size_tokens = self._costs(), self._pool.block_size_tokens
        if costs is None:
            return PULL_S
        num_held = self._pool.count_cached(wanted)
        compute_s = costs.prefill_s(
            (len(wanted) - num_held) * block_size_tokens, num_held * block_size_tokens, self._engine.config.max_num_batched_tokens
        )
        return max(MIN_PULL_S, min(MAX_PULL_S, MAX_TIMES_COMPUTING * compute_s))


def _say_failed(source: PrefixSource, failure: Failure) -> None:
    log.info("prefix_pull_failed", source=str(source.worker), reason=failure.reason.value, problem=failure.message)
