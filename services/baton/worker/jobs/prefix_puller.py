"""Pulls leading blocks of prompts from workers that hold them into this worker's prefix cache, where that was
said to be faster than to compute them. Whatever goes wrong, the blocks are computed: what is pulled is only
ever cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.errors import Failure, Refused
from baton.core.kv.block_hash import BlockHash
from baton.core.messages.jobs import PrefixSource
from baton.core.messages.peer_messages import HashRange
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.runtime.logging import get_logger
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.pull import Pull

log = get_logger(__name__)

MAX_PULLED_SHARE = 0.25
"""Of this worker's blocks: copies, those on their way and those here that no second request has used yet."""
MAX_TIMES_COMPUTING = 2.0
"""A pull is given up when it has taken so many times as long as computing the same blocks would, alone on the
device..."""
MIN_PULL_S = 0.25
"""... but it may always take so long: a pair that was not used for a while is dialled first."""
MAX_PULL_S = 10.0
PULL_S = 2.0
"""As long as that where this worker does not know what computing costs."""


@dataclass(slots=True)
class _UnderWay:
    """One pull. `asked_blocks` are not copies in the pool yet: none from the moment on when it has memory to
    land in."""

    asked_blocks: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PrefixPuller:
    """All prefix pulls of one worker. Single owner: its event loop."""

    def __init__(self, *, engine: Engine, reader: KvReader, costs: Callable[[], StepCostModel | None]) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._reader = reader
        self._costs = costs
        self._max_copies = max(1, int(MAX_PULLED_SHARE * engine.pool.num_blocks))
        self._under_way: dict[BlockHash, _UnderWay] = {}
        """By the first block that it brings."""

    async def bring(
        self, source: PrefixSource, hashes: Sequence[BlockHash], *, cache_salt: bytes = b"", trace_context: str = ""
    ) -> None:
        """Return when the blocks of these `hashes` (a prompt's leading ones) that could be had are in the
        pool's cache, or when it would take too long. Where another pull brings them, that one is waited
        for."""
        wanted = tuple(hashes[: source.num_blocks])
        seconds = self._limit_s(wanted)
        try:
            async with asyncio.timeout(seconds):
                while (same := self._pull_of(wanted)) is not None:
                    await same.ended.wait()
                await self._pull(source, HashRange(hashes=wanted, cache_salt=cache_salt), trace_context)
        except TimeoutError:
            log.info("prefix_pull_given_up", source=str(source.worker), num_blocks=len(wanted), seconds=seconds)
        except Refused as refused:
            _say_failed(source, refused.failure)
        except Exception:  # a bug of ours: it costs the time to compute, no request
            log.exception("prefix_pull_failed", source=str(source.worker))

    def _pull_of(self, wanted: Sequence[BlockHash]) -> _UnderWay | None:
        num_held = self._pool.count_cached(wanted)
        return self._under_way.get(wanted[num_held]) if num_held < len(wanted) else None

    async def _pull(self, source: PrefixSource, wanted: HashRange, trace_context: str) -> None:
        """Raises Refused when the pull fails; what had landed until then stays."""
        held = self._pool.match(wanted.hashes, len(wanted.hashes))  # a chain is of no use without its beginning
        try:
            num_missing = min(len(wanted.hashes) - len(held), self._num_affordable())
            if num_missing > 0:
                asked = HashRange(hashes=wanted.hashes[: len(held) + num_missing], cache_salt=wanted.cache_salt)
                await self._pull_missing(source, asked, len(held), trace_context)
        finally:
            self._pool.unref(held)

    async def _pull_missing(self, source: PrefixSource, asked: HashRange, num_held: int, trace_context: str) -> None:
        first_missing = asked.hashes[num_held]
        under_way = self._under_way[first_missing] = _UnderWay(asked_blocks=len(asked.hashes) - num_held)
        try:
            pull = self._reader.pull(source.worker, asked, have_blocks=num_held, trace_context=trace_context)
            try:
                await self._mark_received(pull, num_held, under_way)
            finally:
                pull.cancel()
        finally:
            del self._under_way[first_missing]
            under_way.ended.set()

    async def _mark_received(self, pull: Pull, num_held: int, under_way: _UnderWay) -> None:
        """Once the holder has said what it has, take room for that and no more, and fill it."""
        await pull.announced()
        final = pull.final
        num_there = (
            0
            if final is None
            else min(under_way.asked_blocks, final.first_block_index + len(final.block_ids) - num_held)
        )
        receiving = self._memory_for(num_there)
        if receiving is None:
            log.info("prefix_not_pulled", num_blocks=num_there, room=self._room(), copies=self._pool.num_copies)
            return
        under_way.asked_blocks = 0
        try:
            pull.receive_into(dict(enumerate(receiving, num_held)), num_held)
            result = await pull.done()
            log.info(
                "prefix_pulled",
                num_blocks=result.num_blocks,
                transfer_bytes=result.transfer_bytes,
                transfer_s=result.kv_transfer_s,
            )
        finally:
            self._pool.unref(
                receiving
            )  # what has landed is cache now; what has not is the pull's until its read has ended

    def _memory_for(self, num_blocks: int) -> list[int] | None:
        """Blocks for so many copies, where the budget asks for it in place of cold ones; None if there is no
        room."""
        num_kept = self._pool.num_copies - self._pool.num_cold_copies
        if not 0 < num_blocks <= self._room() or num_kept + num_blocks > self._max_copies:
            return None
        receiving = self._pool.allocate_receiving(num_blocks)
        if receiving is not None:
            self._pool.mark_copies(receiving)
            self._pool.drop_copies(max(0, self._pool.num_copies - self._max_copies))
        return receiving

    def _num_affordable(self) -> int:
        """For so many more copies there would be budget if all cold ones were dropped."""
        asked = sum(pull.asked_blocks for pull in self._under_way.values())
        return self._max_copies - asked - (self._pool.num_copies - self._pool.num_cold_copies)

    def _room(self) -> int:
        """Every running sequence keeps one block that it may need soon."""
        return self._pool.num_allocatable - self._engine.running_seqs

    def _limit_s(self, wanted: Sequence[BlockHash]) -> float:
        costs, block_size_tokens = self._costs(), self._pool.block_size_tokens
        if costs is None:
            return PULL_S
        num_held = self._pool.count_cached(wanted)
        compute_s = costs.prefill_s(
            (len(wanted) - num_held) * block_size_tokens,
            num_held * block_size_tokens,
            self._engine.config.max_num_batched_tokens,
        )
        return max(MIN_PULL_S, min(MAX_PULL_S, MAX_TIMES_COMPUTING * compute_s))


def _say_failed(source: PrefixSource, failure: Failure) -> None:
    log.info("prefix_pull_failed", source=str(source.worker), reason=failure.reason.value, problem=failure.message)
