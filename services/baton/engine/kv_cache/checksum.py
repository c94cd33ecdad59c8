"""What stands in the KV of a model that is not computed: each slot holds 64 bits that stand for the whole
prefix up to its token.

So a wrong block is a wrong number, and the token that follows from the last slot is a wrong token. A slot is
the one before it times a constant, plus what its token gives: a chain that can be computed for thousands of
tokens at once, and checked from any slot on.
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
"""What the first slot continues."""
_MASK = (1 << 64) - 1
_STEP = 0xD1342543DE82EF95
_STEP_BACK = pow(_STEP, -1, 1 << 64)


class KvCorrupted(AssertionError):
    """A sequence was about to attend to KV that is not its own: the failure that everything in Baton exists
    to prevent."""


def extend(prefix: int, token_id: int) -> int:
    """The content of the slot of `token_id` after a slot of content `prefix`."""
    return (prefix * _STEP + _mixed(START, token_id)) & _MASK


def slots_of(token_ids: TokenIds, prefix: int = START) -> Contents:
    """Contents [len(token_ids)] of the slots of tokens that follow one of content `prefix`: what `extend`
    gives, one after the other."""
    powers, inverses = _powers(1 << (len(token_ids) - 1).bit_length())
    terms = _of_tokens(token_ids)
    sums = np.cumsum(terms * inverses[: len(terms)])
    return (sums + np.uint64(prefix)) * powers[: len(sums)]


def wrong_slot(slots: Contents, tokens: "TokenIds | bytes", before: Sequence[int]) -> tuple[int, int] | None:
    """(row, index) of the first of `slots` [rows, length] that does not continue the one in front of it by
    its token, None if all do. In front of a row's first is that of `before` [rows]; `tokens`: those of all
    rows, one row after the other."""
    in_front = np.concatenate((np.array(before, dtype=np.uint64)[:, None], slots[:, :-1]), axis=1)
    wrong = np.flatnonzero(in_front * np.uint64(_STEP) + _of_tokens(tokens).reshape(slots.shape) != slots)
    return divmod(int(wrong[0]), slots.shape[1]) if len(wrong) else None


def token_after(prefix: int, seed: int, sample_index: int, position: int, vocab_size: int) -> int:
    """The token that follows: a checkable function of the prompt, the sampling key and nothing else."""
    return _mixed(_mixed(_mixed(prefix, seed & 0xFFFFFFFF), sample_index), position) % vocab_size


def _mixed(prefix: int, number: _N) -> _N:
    """Splitmix64's mixing; of an array, of each of its elements."""
    z: Any = (prefix ^ (number + 1) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    mixed: _N = z ^ (z >> 31)
    return mixed


def _of_tokens(tokens: "TokenIds | bytes") -> Contents:
    # A copy: while an array shows somebody's tokens as its own, nobody can append to them.
    return _mixed(START, np.frombuffer(tokens, dtype=np.uint32).astype(np.uint64))


@lru_cache(maxsize=32)
def _powers(count: int) -> tuple[Contents, Contents]:
    """The first `count` powers, from the first on, of `_STEP` and of its inverse."""
    powers, inverses = (
        np.cumprod(np.full(count, base, dtype=np.uint64), dtype=np.uint64) for base in (_STEP, _STEP_BACK)
    )
    return powers, inverses
