"""The tokens of a plan's prompts: drawn from (the plan's seed, segment id, position) by a counter-based hash,
so that they are equal on every machine and need no state.

A segment is a sequence of *choices*, numbers from 0 to V - 1, V being the size of the vocabulary: of token
ids here, of words in `loadgen.plan.words`. From position `k` on a choice is a hash. The first `k` spell the
segment id, so that different ids differ for certain:

    choice 0 = 1 + (id + shift) mod (V - 1)                              the lowest digit, to the base V - 1
    choice j = (digit j + hash of the lower digits) mod V,  0 < j < k    the next digits, to the base V

Consecutive ids thus differ from their first token on, as long as there are at most V - 1 of them; more ids
than that differ within the first `k` tokens, `k` being the number of digits that 2^63 ids need (4 for V =
151,643; 6 for V = 4,096), but never more than 16. A prefix cache shares a block only after all before it, and
its blocks have 16 tokens or more: none takes one segment's first block for another's.

Choice 0 is never 0: prompts that begin with it are those of a warm-up, which share nothing with the plan,
whatever the block size. `shift` and the hashes depend on the plan's seed, so two plans of different seeds
share no block either (between two plans this is a matter of odds, V^(k - 16) for a pair of segments; within
one it is certain).

A shorter segment of an id is the beginning of a longer one.
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
    """The finalizer of splitmix64: a bijection of 64-bit numbers that looks random. Source: Steele, Lea and
    Flood, OOPSLA 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def num_digits(size: int) -> int:
    """The `k` of a vocabulary of `size` choices."""
    digits, capacity = 1, size - 1
    while digits < MAX_DIGITS and capacity <= MAX_ID:
        digits, capacity = digits + 1, capacity * size
    return digits


def max_segment_id(vocabulary: Vocabulary) -> int:
    """The largest id that is told from all others within the first 16 tokens: all of 63 bits, but for
    vocabularies of less than 16."""
    size = vocabulary.size
    return min(MAX_ID, (size - 1) * size ** (num_digits(size) - 1) - 1)


class Choices:
    """The choices of segments among `size`, 2 or more, for one plan's seed."""

    def __init__(self, size: int, seed: int) -> None:
        if not 2 <= size < 2**31:
            raise BadPlan(f"cannot choose among {size}: a vocabulary has from 2 to 2^31 - 1 entries")
        self.size = size
        self._num_digits = num_digits(size)
        self._units = np.array(
            [(size - 1) * size**j for j in range(self._num_digits - 1)], np.uint64
        )  # what digits 1, 2, … count
        self._positions: U64 = np.arange(1, self._num_digits).astype(np.uint64)
        self._key = self._hash(np.array([seed & _MASK], np.uint64), np.uint64(seed >> 64 & _MASK))[0]

    def of(self, segment_ids: Sequence[int], lengths: Sequence[int]) -> NDArray[np.int64]:
        """The segments one after the other: [sum(lengths)]."""
        ids = np.asarray(segment_ids, np.uint64)
        counts = np.asarray(lengths, np.int64)
        starts = np.cumsum(counts) - counts
        positions = np.arange(counts.sum(), dtype=np.uint64) - np.repeat(starts.astype(np.uint64), counts)
        keys = self._hash(ids, self._key)
        choices = self._below_size(mix(np.repeat(keys, counts) + (positions + np.uint64(1)) * np.uint64(_GOLDEN)))
        spelled = self._spelled(ids)
        fits = np.arange(self._num_digits) < counts[:, None]
        choices[(starts[:, None] + np.arange(self._num_digits))[fits]] = spelled[fits]
        return choices

    def warm_up(self, number: int, length: int) -> NDArray[np.int64]:
        """[length]; begins with choice 0, as no segment does; different numbers differ within the next
        `k`."""
        apart = Choices(self.size, int(self._key) ^ _WARM_UP)
        return np.concatenate([np.zeros(1, np.int64), apart.of([number], [length])])[:length]

    def _spelled(self, ids: U64) -> NDArray[np.int64]:
        """The first `k` choices of each id: [len(ids), k]."""
        spelled = np.empty((len(ids), self._num_digits), np.int64)
        shift = np.uint64(int(self._key) % (self.size - 1))
        spelled[:, 0] = (ids + shift) % np.uint64(self.size - 1) + np.uint64(1)
        # A turn is a function of the lower digits alone, which the choices before it determine: so each digit
        # can be read back.
        turns = mix(self._hash(ids[:, None] % self._units, self._key) + self._positions)
        spelled[:, 1:] = (
            ids[:, None] // self._units % np.uint64(self.size) + turns % np.uint64(self.size)
        ) % np.uint64(self.size)
        return spelled

    def _below_size(self, hashes: U64) -> NDArray[np.int64]:
        return ((hashes >> np.uint64(32)) * np.uint64(self.size) >> np.uint64(32)).astype(np.int64)

    @staticmethod
    def _hash(values: U64, key: np.uint64) -> U64:
        return mix(mix(values + np.uint64(_GOLDEN)) ^ key)


class TokenSource:
    """Token ids of generated segments, of one vocabulary and seed."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._choices = Choices(vocabulary.size, seed)
        ids = np.arange(vocabulary.low, vocabulary.high, dtype=np.int64)
        self._ids = np.delete(ids, np.asarray(vocabulary.excluded, np.int64) - vocabulary.low)

    def segments(self, segments: Sequence[Generated]) -> list[int]:
        """Their tokens, one after the other."""
        choices = self._choices.of([s.segment_id for s in segments], [s.num_tokens for s in segments])
        tokens: list[int] = self._ids[choices].tolist()
        return tokens

    def warm_up(self, number: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._ids[self._choices.warm_up(number, num_tokens)].tolist())


def tokens_of(plan: Plan, request: PlannedRequest, answers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The whole prompt of `request`. `answers`: what the requests named by its `AnswerOf` segments were
    answered.

    Raises BadPlan for a prompt of text, which has no token ids here (see `loadgen.plan.words.text_of`),
    KeyError for an answer not in `answers`.
    """
    source = source_of(plan.vocabulary, plan.seed)
    tokens: list[int] = []
    run: list[Generated] = []  # generated segments in a row are drawn at once
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
                raise BadPlan(f"request {request.index} is text: only the server knows its tokens")
    if run:
        tokens += source.segments(run)
    return tuple(tokens)


def warm_up_tokens(plan: Plan, number: int, num_tokens: int) -> tuple[int, ...]:
    """The prompt of warm-up request `number` (from 0): as safe for the server as the plan's. No generated
    prompt of the plan has its first token, so it leaves nothing in a cache that the plan could hit."""
    return source_of(plan.vocabulary, plan.seed).warm_up(number, num_tokens)


@functools.lru_cache(maxsize=8)
def source_of(vocabulary: Vocabulary, seed: int) -> TokenSource:
    return TokenSource(vocabulary, seed)
