"""Limits of reloads from slower tiers, and of pulls that wait for one.

Readers, owners and the scheduler use the same ones, so that a placement counts only on what workers will do.
"""

RELOAD_GAIN = 1.25
"""Computing must be predicted to take this many times as long as a reload. Predictions are no more exact."""
MAX_COMPUTE_RATIO = 2.0
"""A pull is cancelled after this multiple of the time that computing the same blocks would take on an idle
device."""
MIN_PULL_S = 0.25
"""Lower bound of the time limit, because a link that was not used before must be connected first."""
MAX_PULL_S = 10.0
"""Upper bound of the time limit."""
RELOAD_SHARE = 0.5
"""Share of the time limit that the source may take to reload what it has on its disk only. The rest is for
reading it."""
PEER_RELOAD_SHARE = RELOAD_SHARE / RELOAD_GAIN
"""Share of the time limit up to which the source begins a reload: the longest that it predicts."""
