"""Decides which idle blocks are copied to a slower tier, how fast, and when a reload pays.

Pure functions of predicted seconds.
"""

import math

from baton.core.reload_limits import RELOAD_GAIN
from baton.core.step_cost import StepCostModel

WORTH_RATIO = 4.0
"""Content without a second use is copied out if computing it takes this many times as long as reloading it.
Most of it is never used again, so the gain must pay for several copies."""
MAX_STEP_DELAY = 0.02
"""Largest share by which copies out may delay steps."""
DISPLACED_S = 0.0025
"""Time for which a copy delays steps on the same cores besides its own: its threads displace those that
compute, and its data what they have in the caches. `python -m bench kv_copies` measured 1 to 2.6 ms."""
COPY_BYTES = 2**20
"""Bytes of the first copy out, and of a part of a load from a disk."""
MAX_COPY_BYTES = 8 * 2**20
"""Bytes of one copy out for which no reload waits: to a disk."""
MAX_COPY_S = 0.002
"""Time of one copy to the host tier: the longest that a reload waits for one, and that a step may have to
share the memory with one."""
MAX_COPYING_SHARE = 0.25
"""Share of the allocatable blocks that may be in a copy out. The others stay available to sequences."""
MIN_RELOAD_WAIT_S, MAX_RELOAD_WAIT_S = 0.05, 5.0
"""Bounds of a job's wait for its reload. Shorter waits are within the jitter of an event loop."""


def compute_s(costs: StepCostModel, num_tokens: int, context_tokens: int, chunk_tokens: int) -> float:
    """Return the predicted time to compute `num_tokens` tokens of a prompt after `context_tokens`."""
    return costs.prefill_s(num_tokens, context_tokens, chunk_tokens)


def block_compute_s(costs: StepCostModel, block_size_tokens: int, chunk_tokens: int, *, num_before: int = 0) -> float:
    """Return the predicted time to compute one block of a prompt, as a part of a full chunk.

    num_before: blocks before the chunk; 0 leaves out attention to them, which is a lower bound
    """
    chunk_tokens = max(chunk_tokens, block_size_tokens)
    context_tokens = num_before * block_size_tokens
    return costs.prefill_s(chunk_tokens, context_tokens, chunk_tokens) * block_size_tokens / chunk_tokens


def is_worth_copying(*, is_reused: bool, compute_s: float | None, reload_s: float | None) -> bool:
    """Return True if a block should be copied out.

    compute_s, reload_s: predicted time to compute and to reload the block; None if unknown. A block at its
    second use is always copied.
    """
    if is_reused:
        return True
    return compute_s is not None and reload_s is not None and compute_s >= WORTH_RATIO * reload_s


def max_copied_blocks(num_allocatable: int, block_bytes: int, block_s: float | None, *, num_before: int) -> int:
    """Return how many blocks one copy out may have.

    block_s: time to copy one, if reloads wait for copies; None if they do not, or if it is unknown
    num_before: blocks of the copy before. It is at most doubled, because a speed may be measured wrong.
    """
    most = max(1, int(MAX_COPY_S / block_s) if block_s else MAX_COPY_BYTES // block_bytes)
    most = min(most, max(2 * num_before, COPY_BYTES // block_bytes, 1))
    return min(most, int(MAX_COPYING_SHARE * num_allocatable))


def pause_after_s(copy_s: float) -> float:
    """Return how long to pause for a copy that used what steps need for `copy_s` seconds. Copies thus delay
    steps by a share of `MAX_STEP_DELAY` at most, even if each stops a step completely."""
    return copy_s * (1 / MAX_STEP_DELAY - 1)


def reload_pays(*, compute_s: float | None, reload_s: float | None) -> bool:
    """Return True if blocks should be reloaded rather than computed. Unknown times are no reason not to:
    the first reload measures."""
    return compute_s is None or reload_s is None or compute_s >= RELOAD_GAIN * reload_s


def reload_gain_s(*, compute_s: float | None, reload_s: float | None) -> float | None:
    """Return the predicted seconds that a reload saves; None if it does not pay.

    Infinite if a time is unknown.
    """
    if not reload_pays(compute_s=compute_s, reload_s=reload_s):
        return None
    return math.inf if compute_s is None or reload_s is None else compute_s - reload_s


def reload_wait_s(compute_s: float | None) -> float:
    """Return how long a job waits for its reload before it is computed: as long as computing takes, so that a
    slow reload at most doubles that time."""
    return MAX_RELOAD_WAIT_S if compute_s is None else min(max(compute_s, MIN_RELOAD_WAIT_S), MAX_RELOAD_WAIT_S)
