"""Derives the key of the noise that a token is drawn with, from the request alone.

The key depends on seed, sample index and position, so a draw does not depend on where or when it runs.
"""

_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""Constants of splitmix64. Source: Steele et al. 2014."""


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """Return the 64-bit key for one draw. `position` counts from the first prompt token."""
    key = _mix((seed + GOLDEN) & _MASK)
    key = _mix((key ^ sample_index) + GOLDEN & _MASK)
    return _mix((key ^ position) + GOLDEN & _MASK)


def _mix(x: int) -> int:
    """Apply splitmix64's finalizer."""
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)
