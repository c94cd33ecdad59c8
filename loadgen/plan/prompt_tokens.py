"""Generates the tokens of a plan's prompts from (plan seed, segment id, position) with a counter-based hash.

They are equal on every machine and need no state.

A segment is a sequence of *choices*, numbers from 0 to V - 1, where V is the size of the vocabulary: of token
ids here, of words in `loadgen.plan.words`. From position `k` on a choice is a hash. The first `k` choices
encode the segment id, so that different ids always differ:

    choice 0 = 1 + (id + shift) mod (V - 1)                              the lowest digit, to the base V - 1
    choice j = (digit j + hash of the lower digits) mod V,  0 < j < k    the next digits, to the base V

Consecutive ids thus differ from their first token on, as long as there are at most V - 1 of them. More ids
differ within the first `k` tokens. `k` is the number of digits that 2^63 ids need (4 for V = 151,643; 6 for V
= 4,096), at most 16. A prefix cache shares a block only if all blocks before it match, and blocks have 16
tokens or more, so the first blocks of two segments never collide.

Choice 0 is never 0. Warm-up prompts begin with it and therefore share nothing with the plan, whatever the
block size. `shift` and the hashes depend on the plan's seed, so two plans with different seeds share no block
either. Between two plans this holds with high probability, V^(k - 16) for a pair of segments; within one it
is certain.

A shorter segment of an id is a prefix of a longer one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import AnswerOf, Exact, Generated, Plan, PlannedRequest, Vocabulary

MAX_ID = 2**63 - 1
MAX_DIGITS = 16
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WARM_UP = 0x77_61_72_6D_75_70

U64: TypeAlias = "NDArray[np.uint64]"


def mix(values: U64) -> U64:
    """Return the splitmix64 finalizer of 64-bit numbers, a pseudorandom bijection.

    Source: Steele, Lea and Flood, OOPSLA 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def num_digits(size: int) -> int:
    """Return `k` for a vocabulary of `size` choices."""
    digits, capacity = 1, size - 1
    while digits < MAX_DIGITS and capacity <= MAX_ID:
        digits, capacity = digits + 1, capacity * size
    return digits


def max_segment_id(vocabulary: Vocabulary) -> int:
    """Return the largest id that is distinct within the first 16 tokens.

    It has 63 bits, except for vocabularies below 16 entries.
    """
    size = vocabulary.size
    return min(MAX_ID, (size - 1) * size ** (num_digits(size) - 1) - 1)


class Choices:
    """Choices of segments among `size` (2 or more) for one plan seed."""

    def __init__(self, size: int, seed: int) -> None:
        if not 2 <= size < 2**31:
            raise BadPlan(f"the vocabulary has {size} entries; it must have from 2 to 2^31 - 1")
        self.size = size
        self._num_digits = num_digits(size)
        self._units = np.array(
            [(size - 1) * size**j for j in range(self._num_digits - 1)], np.uint64
        )  # weight of digits 1, 2, …
        self._positions: U64 = np.arange(1, self._num_digits).astype(np.uint64)
        self._key = self._hash(np.array([seed & _MASK], np.uint64), np.uint64(seed >> 64 & _MASK))[0]

    def of(self, segment_ids: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int64]:
        """Return the choices of the segments, concatenated, [sum(lengths)]."""
        ids = np.asarray(segment_ids, np.uint64)
        counts = np.asarray(lengths, np.int64)
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum(), dtype=np.uint64) - np.repeat(starts.astype(np.uint64), counts)
        keys = self._hash(ids, self._key)
        choices = self._below_size(mix(np.repeat(keys, counts) + (positions + np.uint64(1)) * np.uint64(_GOLDEN)))
        encoded = self._encoded_ids(ids)
        fits = np.arange(self._num_digits) < counts[:, None]
        choices[(starts[:, None] + np.arange(self._num_digits))[fits]] = encoded[fits]
        return choices

    def warm_up(self, number: int, length: int) -> NDArray[np.int64]:
        """Return the choices of a warm-up, [length].

        They begin with choice 0, as no segment does. Different numbers differ within the next `k`.
        """
        apart = Choices(self.size, int(self._key) ^ _WARM_UP)
        return np.concatenate([np.zeros(1, np.int64), apart.of([number], [length])])[:length]

    def _encoded_ids(self, ids: U64) -> NDArray[np.int64]:
        """Return the first `k` choices of each id, [len(ids), k]."""
        encoded = np.empty((len(ids), self._num_digits), np.int64)
        shift = np.uint64(int(self._key) % (self.size - 1))
        encoded[:, 0] = (ids + shift) % np.uint64(self.size - 1) + np.uint64(1)
        # Each offset depends only on the lower digits, which the choices before it determine. So each digit
        # can be decoded.
        offsets = mix(self._hash(ids[:, None] % self._units, self._key) + self._positions)
        encoded[:, 1:] = (
            ids[:, None] // self._units % np.uint64(self.size) + offsets % np.uint64(self.size)
        ) % np.uint64(self.size)
        return encoded

    def _below_size(self, hashes: U64) -> NDArray[np.int64]:
        return ((hashes >> np.uint64(32)) * np.uint64(self.size) >> np.uint64(32)).astype(np.int64)

    @staticmethod
    def _hash(values: U64, key: np.uint64) -> U64:
        return mix(mix(values + np.uint64(_GOLDEN)) ^ key)


class TokenSource:
    """Token ids of generated segments for one vocabulary and seed."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._choices = Choices(vocabulary.size, seed)
        ids = np.arange(vocabulary.low, vocabulary.high, dtype=np.int64)
        self._ids = np.delete(ids, np.asarray(vocabulary.excluded, np.int64) - vocabulary.low)

    def segments(self, segments: Sequence[Generated]) -> list[int]:
        """Return the tokens of the segments, concatenated."""
        choices = self._choices.of([s.segment_id for s in segments], [s.num_tokens for s in segments])
        tokens: list[int] = self._ids[choices].tolist()
        return tokens

    def warm_up(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """Return the tokens of warm-up prompt `number`."""
        return tuple(self._ids[self._choices.warm_up(number, num_tokens)].tolist())


def tokens_of(plan: Plan, request: PlannedRequest, answers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the full prompt of `request`. `answers` has the responses that its `AnswerOf` segments refer to.

    Raises BadPlan for a prompt with texts (see `loadgen.plan.words.text_of`), KeyError for a missing
    response.
    """
    source = source_of(plan.vocabulary, plan.seed)
    tokens: list[int] = []
    run: list[Generated] = []  # consecutive generated segments are drawn together
    for segment in request.segments:
        if isinstance(segment, Generated):
            run.append(segment)
            continue
        if run:
            tokens += source.segments(run)
            run.clear()
        match segment:
            case Exact(token_ids=token_ids):
                tokens += token_ids
            case AnswerOf(index=index):
                tokens += answers[index]
            case _:
                raise BadPlan(
                    f"request {request.index} is a text, whose tokens only the server knows; send it with "
                    "--prompts text"
                )
    if run:
        tokens += source.segments(run)
    return tuple(tokens)


def warm_up_tokens(plan: Plan, number: int, num_tokens: int) -> tuple[int, ...]:
    """Return the prompt of warm-up request `number` (from 0).

    It uses the plan's vocabulary. No generated prompt of the plan has its first token, so the plan cannot hit
    its blocks in a cache.
    """
    return source_of(plan.vocabulary, plan.seed).warm_up(number, num_tokens)


@functools.lru_cache(maxsize=8)
def source_of(vocabulary: Vocabulary, seed: int) -> TokenSource:
    """Return the cached token source of a vocabulary and seed."""
    return TokenSource(vocabulary, seed)
