"""Decides how a preempted sequence gets its KV back: computed again, or copied to a slower tier and reloaded.

A preempted sequence will certainly need its KV again. The decision is therefore not that of content which may
never be used again (`copy_policy.is_worth_copying`).
"""

from dataclasses import dataclass
from enum import Enum

from baton.core.reload_limits import RELOAD_GAIN


class WayBack(Enum):
    """The source of the KV of a preempted sequence, as far as it is evicted meanwhile."""

    RECOMPUTE = "recompute"
    RELOAD = "reload"


@dataclass(frozen=True, slots=True, kw_only=True)
class WayBackDecision:
    """The way that was chosen, and the predicted seconds of both, as if all blocks were evicted.

    compute_s: to compute the tokens again. reload_s: to copy out what the tier lacks, and to load all blocks.
        None if unknown.
    """

    way: WayBack
    compute_s: float | None
    reload_s: float | None


def choose_way_back(*, compute_s: float | None, store_s: float | None, load_s: float | None) -> WayBackDecision:
    """Choose the way back that is predicted to be faster.

    Computing must take `RELOAD_GAIN` times as long, because a later reload is decided by that, too. A time
    that is unknown decides for computing, which needs no copy.

    store_s: to copy out the blocks that the tier lacks. load_s: to load all blocks
    """
    reload_s = None if store_s is None or load_s is None else store_s + load_s
    is_faster = compute_s is not None and reload_s is not None and compute_s >= RELOAD_GAIN * reload_s
    return WayBackDecision(
        way=WayBack.RELOAD if is_faster else WayBack.RECOMPUTE, compute_s=compute_s, reload_s=reload_s
    )
