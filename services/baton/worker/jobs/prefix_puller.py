"""Pulls cached prefixes of prompts from other workers into this worker's prefix cache.

The scheduler asks for a pull if it predicts that pulling is faster than computing. A failed pull costs only
time: the engine computes the blocks that are not in the cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.errors import Failure, Refused
from baton.core.kv.block_hash import NO_HASH, BlockHash
from baton.core.kv.kv_tables import entries_from, hashes_of_prefix
from baton.core.messages.jobs import PrefixSource
from baton.core.messages.peer_messages import HashRange
from baton.core.reload_limits import MAX_COMPUTE_RATIO, MAX_PULL_S, MIN_PULL_S, RELOAD_SHARE
from baton.core.request import SessionKey
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine
from baton.engine.retention.content_owner import ContentOwner
from baton.runtime.logging import get_logger
from baton.transfer.reader.kv_reader import KvReader
from baton.transfer.reader.pull import Pull

log = get_logger(__name__)

MAX_PULLED_SHARE = 0.25
"""Upper bound on the share of blocks that are replicas: those under way, and those that no second request has
used yet."""
MAX_MOVING_SHARE = 0.5
"""Upper bound on the share of blocks that are received while the KV of sessions is pulled."""
DEFAULT_PULL_S = 2.0
"""Time limit while the step costs of this worker are unknown."""


@dataclass(slots=True)
class _RunningPull:
    """One running pull.

    num_asked_blocks: blocks it asked for
    unallocated_blocks: those that are kept for it; 0 once it has receiving blocks in the pool, and while its
        source reloads, which must not block other pulls
    owner: of what it receives; None: unknown
    makes_replicas: the source's copy stays the better one
    """

    num_asked_blocks: int
    unallocated_blocks: int
    owner: ContentOwner | None
    makes_replicas: bool
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PrefixPuller:
    """All prefix pulls of one worker. Used from one event loop."""

    def __init__(self, *, engine: Engine, reader: KvReader, costs: Callable[[], StepCostModel | None]) -> None:
        self._engine = engine
        self._pool = engine.pool
        self._reader = reader
        self._costs = costs
        self._max_replicas = max(1, int(MAX_PULLED_SHARE * engine.pool.num_blocks))
        self._running: dict[BlockHash, _RunningPull] = {}  # by the first missing block

    async def pull(
        self,
        source: PrefixSource,
        hashes: Sequence[BlockHash],
        *,
        cache_salt: bytes = b"",
        tenant_root: BlockHash = NO_HASH,
        owner: ContentOwner | None = None,
        moving_session: SessionKey | None = None,
        trace_context: str = "",
    ) -> None:
        """Pull the leading blocks of a prompt into the prefix cache.

        Returns when the available blocks are cached, when the pull fails, or after the time limit. If another
        pull already fetches the first missing block, it waits for that pull.

        hashes: of the prompt's leading blocks. tenant_root: of the tenant whose prompt it is
        owner: of what the request uses; None: unknown
        moving_session: goes on here; None if none does. Its KV is no replica here. What the source keeps of
            it is evicted first, because the next turn finds more here.
        """
        wanted = tuple(hashes[: source.num_blocks])
        needed = hashes_of_prefix(wanted, self._pool.windows)
        limit_s = self._limit_s(wanted)
        try:
            async with asyncio.timeout(limit_s):
                while (running := self._running_pull(needed)) is not None:
                    await running.ended.wait()
                asked = HashRange(
                    hashes=wanted,
                    cache_salt=cache_salt,
                    moving_session=moving_session,
                    reload_within_s=RELOAD_SHARE * limit_s if source.num_disk_blocks else 0.0,
                )
                await self._pull(source, asked, needed, tenant_root, owner, trace_context)
        except TimeoutError:
            log.info("prefix_pull_timed_out", source=str(source.worker), num_blocks=len(wanted), limit_s=limit_s)
        except Refused as refused:
            _log_failure(source, refused.failure)
        except Exception:  # a bug in Baton must not fail the request
            log.exception("prefix_pull_failed", source=str(source.worker))

    def _running_pull(self, needed: Sequence[BlockHash]) -> _RunningPull | None:
        num_held = self._pool.count_cached(needed)
        return self._running.get(needed[num_held]) if num_held < len(needed) else None

    async def _pull(
        self,
        source: PrefixSource,
        wanted: HashRange,
        needed: Sequence[BlockHash],
        tenant_root: BlockHash,
        owner: ContentOwner | None,
        trace_context: str,
    ) -> None:
        """Raise Refused if the pull fails. Blocks that were received until then stay in the cache.

        needed: hashes of the blocks with which `wanted` can be continued, over all block tables.
        """
        held = self._pool.match(needed, len(needed))  # referenced, so that the prefix is not evicted
        try:
            num_missing = len(needed) - len(held)
            if wanted.moving_session is not None and num_missing > self._num_affordable(are_replicas=False):
                wanted = replace(wanted, moving_session=None)
            makes_replicas = wanted.moving_session is None
            num_missing = min(num_missing, self._num_affordable(are_replicas=makes_replicas))
            if num_missing <= 0:
                return
            if len(held) + num_missing < len(needed):
                if self._pool.windows.has_windows:  # a part of the prefix is of no use
                    return
                wanted = replace(wanted, hashes=wanted.hashes[: len(held) + num_missing])
            running = _RunningPull(
                num_asked_blocks=num_missing,
                unallocated_blocks=0 if source.num_disk_blocks else num_missing,
                owner=owner,
                makes_replicas=makes_replicas,
            )
            await self._pull_missing(source, wanted, needed[len(held)], len(held), running, trace_context)
        finally:
            self._pool.announce(wanted.hashes, 0, len(wanted.hashes), is_end=True, tenant_root=tenant_root)
            self._pool.unref(held)

    async def _pull_missing(
        self,
        source: PrefixSource,
        asked: HashRange,
        first_missing: BlockHash,
        num_held: int,
        running: _RunningPull,
        trace_context: str,
    ) -> None:
        self._running[first_missing] = running
        try:
            pull = self._reader.pull(source.worker, asked, have_blocks=num_held, trace_context=trace_context)
            try:
                await self._receive(pull, len(asked.hashes), num_held, running)
            finally:
                pull.cancel()
        finally:
            del self._running[first_missing]
            running.ended.set()

    async def _receive(self, pull: Pull, num_blocks: int, num_held: int, running: _RunningPull) -> None:
        """Wait for the owner's announcement, allocate blocks for what it holds, and read them.

        num_blocks: length of the prefix. num_held: blocks of it that are here, over all block tables.
        """
        await pull.announced()
        final = pull.final
        num_available = (
            0
            if final is None
            else min(running.num_asked_blocks, final.first_block_index + len(final.block_ids) - num_held)
        )
        if not running.unallocated_blocks:  # meanwhile other pulls may have taken the budget
            num_available = max(0, min(num_available, self._num_affordable(are_replicas=running.makes_replicas)))
        windows = self._pool.windows
        entries = entries_from(windows.first_blocks(num_blocks * windows.block_size_tokens), num_blocks)
        if windows.has_windows and num_held + num_available < len(entries):
            num_available = 0  # a part of the prefix is of no use: the window before its end is missing
        entries = entries[num_held : num_held + num_available]
        receiving = self._allocate(entries, running.makes_replicas)
        if receiving is None:
            log.info(
                "prefix_pull_skipped",
                num_blocks=num_available,
                num_free_blocks=self._num_free_blocks(),
                num_replicas=self._pool.num_replicas,
            )
            return
        running.unallocated_blocks = 0
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
            # Received blocks stay in the cache. The pull still owns the others until their reads have ended.
            positions = [entry // windows.num_tables for entry in entries]
            self._pool.unref(receiving, running.owner, positions)

    def _allocate(self, entries: Sequence[int], are_replicas: bool) -> list[int] | None:
        """Allocate blocks to receive into, evicting idle replicas if their budget requires it.

        entries: of a flat block table. None if that is not possible.
        """
        num_blocks = len(entries)
        if not 0 < num_blocks <= self._num_free_blocks():
            return None
        if not are_replicas:  # the request needs the blocks in any case
            return self._pool.allocate_receiving(num_blocks, entries)
        num_kept = self._pool.num_replicas - self._pool.num_idle_replicas
        if num_kept + num_blocks > self._max_replicas:
            return None
        receiving = self._pool.allocate_receiving(num_blocks, entries)
        if receiving is not None:
            self._pool.mark_replicas(receiving)
            self._pool.evict_replicas(max(0, self._pool.num_replicas - self._max_replicas))
        return receiving

    def _num_affordable(self, *, are_replicas: bool) -> int:
        """Return how many more replicas, or blocks of sessions that move, the budget allows.

        Idle replicas count as evicted. The blocks of sessions count until they have arrived.
        """
        pulls = [pull for pull in self._running.values() if pull.makes_replicas is are_replicas]
        asked = sum(pull.unallocated_blocks for pull in pulls)
        if not are_replicas:
            budget = int(MAX_MOVING_SHARE * self._pool.num_blocks) - self._pool.counts().receiving
            return min(budget, self._num_free_blocks()) - asked
        return self._max_replicas - asked - (self._pool.num_replicas - self._pool.num_idle_replicas)

    def _num_free_blocks(self) -> int:
        """Return the blocks that may be allocated. The blocks of one token are kept for each running
        sequence."""
        spare = self._engine.running_seqs * self._pool.windows.num_tables
        return self._pool.num_allocatable - spare - self._engine.num_reserved_blocks

    def _limit_s(self, wanted: Sequence[BlockHash]) -> float:
        """Return the time limit of a pull, in seconds."""
        costs, block_size_tokens = self._costs(), self._pool.block_size_tokens
        if costs is None:
            return DEFAULT_PULL_S
        num_held = self._pool.lookup_prefix(wanted).num_blocks
        compute_s = costs.prefill_s(
            (len(wanted) - num_held) * block_size_tokens,
            num_held * block_size_tokens,
            self._engine.config.max_num_batched_tokens,
        )
        return max(MIN_PULL_S, min(MAX_PULL_S, MAX_COMPUTE_RATIO * compute_s))


def _log_failure(source: PrefixSource, failure: Failure) -> None:
    log.info("prefix_pull_failed", source=str(source.worker), reason=failure.reason.value, problem=failure.message)
