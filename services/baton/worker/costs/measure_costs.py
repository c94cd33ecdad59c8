"""Measures step costs at start by running steps of several sizes on the device, through the executor only."""

import asyncio
import fcntl
import math
import os
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from baton.core.errors import BatonError
from baton.core.kv.block_hash import num_blocks_for
from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel, StepWork, fit_costs
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.step import DeviceFault, Executor, SampleRequest, StepPlan, StepSequence
from baton.runtime.logging import get_logger
from baton.worker.costs.step_cost_keeper import work_of

log = get_logger(__name__)

BUDGET_S = 2.0
"""Time limit for all sizes together. One prefill step and one decode step always run, however long they take,
because costs cannot be fitted without them."""
NUM_ROUNDS = 3
"""Rounds over all sizes. The shortest time of each size counts: a first step allocates memory, and any
disturbance makes a step longer."""
LOCK_WAIT_S = 20.0
"""Maximum wait for other workers of this host that measure. After that, this worker measures at the same
time."""
LOCK_POLL_S = 0.05

LONG_CONTEXT_TOKENS = 2_048
NUM_TOKEN_IDS = 32
"""Measuring steps use the token ids below this number. Which tokens they are does not affect the cost."""


class CannotMeasure(BatonError):
    """A measuring step failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """A step of `num_seqs` sequences that schedules `num_tokens` each, after `context_tokens` computed
    tokens.

    num_drafts: how many of the tokens are drafts.
    """

    num_seqs: int = 1
    num_tokens: int = 1
    context_tokens: int = 0
    num_drafts: int = 0

    def blocks_each(self, block_size_tokens: int) -> int:
        """Return the KV blocks that each sequence needs."""
        return num_blocks_for(self.context_tokens + self.num_tokens, block_size_tokens)

    def num_blocks(self, block_size_tokens: int) -> int:
        """Return the KV blocks that all sequences need."""
        return self.num_seqs * self.blocks_each(block_size_tokens)


@dataclass(frozen=True, slots=True)
class _MeasuredBlocks:
    """The blocks of the measured sequences, in each of `num_tables` block tables."""

    block_ids: Sequence[int]
    block_size_tokens: int
    num_tables: int

    def of(self, size: StepSize) -> Iterator[tuple[int, ...]]:
        """Yield the flat block table of each sequence of a step."""
        step = size.blocks_each(self.block_size_tokens) * self.num_tables
        return (tuple(self.block_ids[i * step : (i + 1) * step]) for i in range(size.num_seqs))


async def measure_costs(
    executor: Executor, config: EngineConfig, pool: BlockPool, *, budget_s: float = BUDGET_S
) -> StepCostModel | None:
    """Measure steps on free blocks of `pool` and fit a cost model to them.

    Returns None, with a log event, if the measurements fail or do not give usable costs. Raises DeviceFault
    if the device fails.
    """
    began_s = asyncio.get_running_loop().time()
    num_tables = pool.windows.num_tables
    sizes = step_sizes(config, pool.num_allocatable // num_tables)
    most = max((size.num_blocks(config.block_size_tokens) for size in sizes), default=0)
    block_ids = pool.allocate(most * num_tables) or []
    try:
        tables = _MeasuredBlocks(block_ids, config.block_size_tokens, num_tables)
        measured = await _measure(executor, sizes, tables, began_s + budget_s)
        costs = fit_costs(measured)
    except DeviceFault:
        raise
    except Exception as error:  # any executor error; if it is permanent, requests will fail with it, too
        log.warning("costs_not_measured", problem=f"{type(error).__name__}: {error}")
        return None
    finally:
        pool.unref(block_ids)
    log.info(
        "costs_measured",
        num_sizes=len(measured),
        duration_s=asyncio.get_running_loop().time() - began_s,
        step_s=costs.step_s,
        prefill_token_s=costs.prefill_token_s,
        decode_seq_s=costs.decode_seq_s,
    )
    return costs


def step_sizes(config: EngineConfig, num_blocks: int) -> list[StepSize]:
    """Return the distinct step sizes to measure, most important first.

    Only sizes that respect the engine's limits and fit in `num_blocks` blocks a table are returned.
    """
    chunk = min(config.max_num_batched_tokens, config.max_model_len, num_blocks * config.block_size_tokens)
    most = min(config.max_model_len, num_blocks * config.block_size_tokens)
    wanted = [
        _prefill(min(64, chunk), 0, most),
        _decode(1, 256, most),
        _prefill(min(256, chunk), 0, most),
        _decode(8, 256, most),
        _verify(1, 3, 256, most),
        _prefill(min(1_024, chunk), 0, most),
        _prefill(min(64, chunk), LONG_CONTEXT_TOKENS, most),
        _decode(8, 1_024, most),
        _prefill(chunk, 0, most),
        _decode(32, 256, most),
        _verify(1, 7, 256, most),
        _verify(8, 3, 256, most),
        _prefill(chunk, LONG_CONTEXT_TOKENS, most),
        _decode(1, 1_024, most),
        _decode(32, 1_024, most),
    ]

    def is_possible(size: StepSize) -> bool:
        fits_pool = size.num_blocks(config.block_size_tokens) <= num_blocks
        return (
            fits_pool
            and size.context_tokens + size.num_tokens <= config.max_model_len
            and size.num_seqs <= config.max_num_seqs
            and size.num_seqs * size.num_tokens <= config.max_num_batched_tokens
        )

    return [size for size in dict.fromkeys(wanted) if is_possible(size)]


@asynccontextmanager
async def measurement_lock(path: Path, *, wait_s: float = LOCK_WAIT_S) -> AsyncIterator[bool]:
    """Hold the lock file at `path`, so that only one process of the host measures at a time.

    Yields False if the lock was not available within `wait_s` seconds; the caller then measures without it.
    The kernel releases the lock of a process that dies.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("measurement_lock_failed", path=str(path), problem=str(error))
        yield False
        return
    try:
        yield await _locked(file, asyncio.get_running_loop().time() + wait_s)
    finally:
        os.close(file)


def measurement_lock_path() -> Path:
    """Return the lock file that all workers of this user on this host share."""
    return Path(tempfile.gettempdir()) / f"baton-measuring-{os.getuid()}.lock"


async def _locked(file: int, until_s: float) -> bool:
    loop = asyncio.get_running_loop()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if loop.time() >= until_s:
                return False
        else:
            return True
        await asyncio.sleep(LOCK_POLL_S)


def _prefill(num_tokens: int, context_tokens: int, most: int) -> StepSize:
    return StepSize(num_tokens=num_tokens, context_tokens=max(0, min(context_tokens, most - num_tokens)))


def _decode(num_seqs: int, context_tokens: int, most: int) -> StepSize:
    return StepSize(num_seqs=num_seqs, context_tokens=max(0, min(context_tokens, most - 1)))


def _verify(num_seqs: int, num_drafts: int, context_tokens: int, most: int) -> StepSize:
    size = StepSize(num_seqs=num_seqs, num_tokens=1 + num_drafts, num_drafts=num_drafts)
    return replace(size, context_tokens=max(0, min(context_tokens, most - size.num_tokens)))


async def _measure(
    executor: Executor, sizes: Sequence[StepSize], tables: _MeasuredBlocks, until_s: float
) -> list[tuple[StepWork, float]]:
    """Return the shortest time of each size, in seconds. Skips sizes that would exceed the remaining time.

    Raises CannotMeasure, or any error of the executor.
    """
    loop, step_ids = asyncio.get_running_loop(), count(1)
    least_s: dict[StepWork, float] = {}
    for size in NUM_ROUNDS * tuple(sizes):
        plan = StepPlan(step_id=next(step_ids), sequences=tuple(_sequences(size, tables.of(size))))
        work = work_of(plan)
        expected_s = least_s.get(work) or _guess_s(work, least_s)
        if expected_s is None or loop.time() + expected_s <= until_s:
            step_s = await _timed(executor, plan)
            least_s[work] = min(step_s, least_s.get(work, step_s))
    return list(least_s.items())


def _guess_s(work: StepWork, measured: Mapping[StepWork, float]) -> float | None:
    """Predict a step's time from measured steps of the same kind; None if there are none.

    Scales each measured time by the geometric mean of the smallest and the largest growth of its features,
    and returns the smallest result. A draft token counts as a decoding sequence.
    """
    guesses = []
    work = _without_drafts(work)
    for with_drafts, step_s in measured.items():
        known = _without_drafts(with_drafts)
        if known.kind is work.kind:
            growths = [new / old for new, old in zip(work.features[1:], known.features[1:], strict=True) if new and old]
            guesses.append(step_s * math.sqrt(min(growths) * max(growths)))
    return min(guesses, default=None)


def _without_drafts(work: StepWork) -> StepWork:
    return replace(work.without_drafts, num_decode_seqs=work.num_decode_seqs + work.num_draft_tokens)


async def _timed(executor: Executor, plan: StepPlan) -> float:
    """Run one step and return its duration in seconds. Raises CannotMeasure if the step failed."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    result = await executor.execute(plan)
    if result.failures:
        raise CannotMeasure(next(iter(result.failures.values())).message)
    return loop.time() - started_s


def _sequences(size: StepSize, tables: Iterator[tuple[int, ...]]) -> Iterator[StepSequence]:
    """Yield sequences that sample a token, as a prompt's last chunk and each decoding sequence do.

    The drafts are wrong. So a CPU draws one token for each sequence, and the cost of drawing those after
    right drafts is left to live correction.
    """
    token_ids = array("I", (i % NUM_TOKEN_IDS for i in range(size.context_tokens + size.num_tokens)))
    position = len(token_ids) - size.num_drafts
    for seq_id, table in enumerate(tables, 1):
        yield StepSequence(
            seq_id=seq_id,
            token_ids=token_ids[size.context_tokens :],
            position_begin=size.context_tokens,
            kv_begin=size.context_tokens,
            block_table=table,
            sample=SampleRequest(
                sampling=Sampling(seed=0, max_tokens=1),
                sample_indices=(0,),
                position=position,
                history=token_ids,
                num_prompt_tokens=position,
                drafts=tuple(token_ids[position:]),
            ),
        )
