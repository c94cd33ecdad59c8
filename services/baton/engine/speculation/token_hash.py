"""Hashes of short token sequences, the same for one sequence in Python and for many with numpy."""

from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd constants, one for each place from the end. The high bits of the sum are the best ones."""
MAX_HASHED = len(_FACTORS)
_OFFSETS = tuple(sum(_FACTORS[:length]) for length in range(MAX_HASHED + 1))


def hash_of(tokens: Sequence[int]) -> int:
    """Return a 64-bit hash of at most `MAX_HASHED` tokens: the sum of (token + 1) times its factor."""
    total: int = sum(map(mul, _FACTORS, tokens), _OFFSETS[len(tokens)])
    return total & _MASK


def hashes_of(tokens: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.uint64]:
    """Return `hash_of` each run of `length` tokens, [len(tokens) - length + 1]."""
    count = len(tokens) - length + 1
    found = np.zeros(count, dtype=np.uint64)
    for place in range(length):
        found += (tokens[place : place + count] + np.uint64(1)) * np.uint64(_FACTORS[place])
    return found
