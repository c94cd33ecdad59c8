"""Whose noise a token is drawn with: a function of what is drawn, the same wherever, however often and beside
whatever else it happens."""

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""splitmix64's. Source: Steele et al. 2014."""


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """64 bits for one token to be drawn; `position` counts from the first prompt token."""
    key = _mix((seed + GOLDEN) & _MASK)
    key = _mix((key ^ sample_index) + GOLDEN & _MASK)
    return _mix((key ^ position) + GOLDEN & _MASK)


def _mix(x: int) -> int:
    """splitmix64's finalizer."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)
