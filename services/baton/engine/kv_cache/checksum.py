"""Checksums that emulated devices store in place of KV.

Each KV slot holds a 64-bit checksum of the whole prefix up to its token. The next token is computed from the
checksum in the last slot, so a wrong block leads to a wrong token. A checksum is the previous one times a
constant, plus a hash of the token. It can be computed for thousands of tokens with numpy, and checked from
any slot on.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from baton.core.kv.block_hash import TokenIds

Contents = npt.NDArray[np.uint64]
_N = TypeVar("_N", int, Contents)

START = 0x9E3779B97F4A7C15
"""Checksum of the empty prefix."""
_MASK = (1 << 64) - 1
_STEP = 0xD1342543DE82EF95
_STEP_BACK = pow(_STEP, -1, 1 << 64)


class KvCorrupted(AssertionError):
    """A sequence would attend to KV that is not its own.

    Block management and transfers must never cause this.
    """


def extend(prefix: int, token_id: int) -> int:
    """Return the checksum of the slot of `token_id` that follows a slot with checksum `prefix`."""
    return (prefix * _STEP + _mixed(START, token_id)) & _MASK


def slots_of(token_ids: TokenIds, prefix: int = START) -> Contents:
    """Return the checksums [len(token_ids)] of the slots of `token_ids` after a slot with checksum `prefix`.

    Equal to repeated calls of `extend`, but vectorized.
    """
    powers, inverses = _powers(1 << (len(token_ids) - 1).bit_length())
    terms = _of_tokens(token_ids)
    sums = np.cumsum(terms * inverses[: len(terms)])
    return (sums + np.uint64(prefix)) * powers[: len(sums)]


def wrong_slot(slots: Contents, tokens: "TokenIds | bytes", before: Sequence[int]) -> tuple[int, int] | None:
    """Return (row, index) of the first slot whose checksum does not follow from the slot before it, or None.

    slots: [rows, length] checksums.
    tokens: tokens of all rows, concatenated.
    before: [rows] checksum before the first slot of each row.
    """
    previous = np.concatenate((np.array(before, dtype=np.uint64)[:, None], slots[:, :-1]), axis=1)
    wrong = np.flatnonzero(previous * np.uint64(_STEP) + _of_tokens(tokens).reshape(slots.shape) != slots)
    return divmod(int(wrong[0]), slots.shape[1]) if len(wrong) else None


def token_after(prefix: int, seed: int, sample_index: int, position: int, vocab_size: int) -> int:
    """Return the next token after a prefix. It depends only on the prefix checksum and the sampling key."""
    return _mixed(_mixed(_mixed(prefix, seed & 0xFFFFFFFF), sample_index), position) % vocab_size


def _mixed(prefix: int, number: _N) -> _N:
    """Return a 64-bit hash of `prefix` and `number` (SplitMix64), element-wise for arrays."""
    z: Any = (prefix ^ (number + 1) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed: _N = z ^ (z >> 31)
    return mixed


def _of_tokens(tokens: "TokenIds | bytes") -> Contents:
    # astype copies: while numpy exports the buffer of an array, the array cannot grow.
    return _mixed(START, np.frombuffer(tokens, dtype=np.uint32).astype(np.uint64))


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[Contents, Contents]:
    """Return the powers 1 to `count` of `_STEP` and of its inverse, modulo 2**64."""
    powers, inverses = (
        np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64) for base in (_STEP, _STEP_BACK)
    )
    return powers, inverses
