"""Tokens of segments: equal for equal ids, different from the first token for others, and distinct from
warm-ups."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import Generated, Vocabulary
from loadgen.plan.prompt_tokens import (
    MAX_ID,
    Choices,
    TokenSource,
    max_segment_id,
    mix,
    num_digits,
    tokens_of,
    warm_up_tokens,
)
from tests.scale import sized
from tests.unit.loadgen.plans import chat_plan, plan, request

IDS = st.integers(0, MAX_ID)
SEEDS = st.integers(0, 2**64)
BLOCK = 16


def tokens(segment_id: int, num_tokens: int, vocabulary: Vocabulary, seed: int = 0) -> list[int]:
    return TokenSource(vocabulary, seed).segments([Generated(segment_id=segment_id, num_tokens=num_tokens)])


@st.composite
def vocabularies(draw: st.DrawFn, least: int = 2) -> Vocabulary:
    low = draw(st.integers(0, 5000))
    span = draw(st.integers(least, 300) | st.integers(4000, 200_000))
    excluded = draw(st.lists(st.integers(low, low + span - 1), unique=True, max_size=span - least))
    return Vocabulary(low=low, high=low + span, excluded=tuple(sorted(excluded)))


def test_tokens_are_fixed() -> None:
    """Other numbers would make every old plan another workload."""
    assert mix(np.array([0x9E3779B97F4A7C15], np.uint64)).tolist() == [
        0xE220A8397B1DCDAF
    ]  # the first number of splitmix64 from seed 0
    assert tokens(0, 10, Vocabulary(low=1000, high=4096)) == [
        1322,
        1800,
        1278,
        1066,
        1612,
        3812,
        1659,
        2347,
        3625,
        2217,
    ]
    assert tokens(182_789, 10, Vocabulary(low=1000, high=4096)) == [
        1506,
        1428,
        1523,
        2592,
        2901,
        3895,
        2120,
        2934,
        3224,
        1655,
    ]


@given(IDS, st.integers(1, 200), vocabularies(least=16), SEEDS)
def test_tokens_have_the_requested_number_and_vocabulary(
    segment_id: int, num_tokens: int, vocabulary: Vocabulary, seed: int
) -> None:
    found = tokens(segment_id, num_tokens, vocabulary, seed)
    assert len(found) == num_tokens
    assert all(vocabulary.low <= token < vocabulary.high for token in found)
    assert not set(found) & set(vocabulary.excluded)


@given(IDS, st.integers(1, 100), st.integers(1, 100), vocabularies(least=16), SEEDS)
def test_shorter_segment_is_a_prefix_of_a_longer_one(
    segment_id: int, a: int, b: int, vocabulary: Vocabulary, seed: int
) -> None:
    short, long = sorted((a, b))
    assert tokens(segment_id, long, vocabulary, seed)[:short] == tokens(segment_id, short, vocabulary, seed)


@given(st.lists(st.tuples(IDS, st.integers(1, 60)), min_size=1, max_size=8), SEEDS)
def test_segments_are_independent_of_their_neighbours(segments: list[tuple[int, int]], seed: int) -> None:
    vocabulary = Vocabulary(low=3, high=4096)
    together = TokenSource(vocabulary, seed).segments([Generated(segment_id=id_, num_tokens=n) for id_, n in segments])
    assert together == list(itertools.chain.from_iterable(tokens(id_, n, vocabulary, seed) for id_, n in segments))


@given(IDS, IDS, vocabularies(least=16), SEEDS)
def test_two_ids_never_share_a_block(a: int, b: int, vocabulary: Vocabulary, seed: int) -> None:
    first, second = tokens(a, BLOCK, vocabulary, seed), tokens(b, BLOCK, vocabulary, seed)
    assert (first == second) == (a == b)


@given(vocabularies(), SEEDS, st.data())
def test_neighbouring_ids_differ_from_the_first_token(vocabulary: Vocabulary, seed: int, data: st.DataObject) -> None:
    """Any V - 1 consecutive ids have V - 1 different first tokens."""
    count = min(vocabulary.size - 1, 500)
    start = data.draw(st.integers(0, max_segment_id(vocabulary) - count + 1))
    found = TokenSource(vocabulary, seed).segments(
        [Generated(segment_id=start + i, num_tokens=1) for i in range(count)]
    )
    assert len(set(found)) == count


@pytest.mark.parametrize("size", [2, 3, 5, 7, 15, 16, 17])
def test_ids_of_a_tiny_vocabulary_differ_within_a_block(size: int) -> None:
    vocabulary = Vocabulary(low=0, high=size)
    last = max_segment_id(vocabulary)
    ids = sorted(
        {*range(min(2000, last + 1)), *range(max(0, last - 2000), last + 1), *(min(last, 7**n) for n in range(22))}
    )
    choices = Choices(size, seed=5).of(ids, [BLOCK] * len(ids)).reshape(-1, BLOCK)
    assert len(np.unique(choices, axis=0)) == len(ids)


def test_more_ids_than_tokens_differ_within_two_tokens() -> None:
    """The conversation trace has 182,790 ids, the demo model 4,093 ordinary tokens."""
    ids = list(range(182_790))
    pairs = Choices(4093, seed=0).of(ids, [2] * len(ids)).reshape(-1, 2)
    assert len(np.unique(pairs, axis=0)) == len(ids)


def test_number_of_digits() -> None:
    assert [num_digits(size) for size in (2, 16, 4093, 151_643, 2**31 - 1)] == [16, 16, 6, 4, 3]
    assert max_segment_id(Vocabulary(low=0, high=2)) == 2**15 - 1
    assert max_segment_id(Vocabulary(low=0, high=16)) == MAX_ID


@given(st.integers(0, 10**6), st.integers(1, 40), IDS, vocabularies(least=16), SEEDS)
def test_warm_up_shares_no_first_token_with_the_plan(
    number: int, num_tokens: int, segment_id: int, vocabulary: Vocabulary, seed: int
) -> None:
    source = TokenSource(vocabulary, seed)
    warm_up = source.warm_up(number, num_tokens)
    assert len(warm_up) == num_tokens
    assert warm_up[0] != source.segments([Generated(segment_id=segment_id, num_tokens=1)])[0]
    assert set(warm_up) <= set(range(vocabulary.low, vocabulary.high)) - set(vocabulary.excluded)


def test_warm_ups_differ_and_so_do_seeds() -> None:
    num_warm_ups, num_seeds = sized(300, 1000), sized(40, 100)
    assert len({warm_up_tokens(chat_plan(), number, BLOCK + 1) for number in range(num_warm_ups)}) == num_warm_ups
    assert warm_up_tokens(chat_plan(), 0, 5) == warm_up_tokens(chat_plan(), 0, 50)[:5]
    blocks = {
        tuple(tokens(segment_id, BLOCK, Vocabulary(low=3, high=4096), seed))
        for segment_id in range(100)
        for seed in range(num_seeds)
    }
    assert len(blocks) == 100 * num_seeds


@settings(max_examples=20)
@given(SEEDS)
def test_tokens_are_uniform(seed: int) -> None:
    """Chi-squared of 64 tokens drawn 64,000 times, with a limit of six deviations."""
    choices = Choices(64, seed).of(list(range(100)), [656] * 100).reshape(100, 656)[:, 16:]
    counts = np.bincount(choices.ravel(), minlength=64)
    chi = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert abs(chi - 63) < 6 * (2 * 63) ** 0.5 + 20


def test_prompt_is_its_segments_in_order() -> None:
    planned = plan(
        request(0, (0, 40), [7, 8], (1, 20), session="s", output=3),
        request(1, (0, 40), [7, 8], (1, 20), 0, (2, 4), (3, 5), session="s", turn=1, after=0),
    )
    first = tokens_of(planned, planned.requests[0], {})
    second = tokens_of(planned, planned.requests[1], {0: (91, 92, 93)})
    assert first == (*tokens(0, 40, planned.vocabulary), 7, 8, *tokens(1, 20, planned.vocabulary))
    assert second == (*first, 91, 92, 93, *tokens(2, 4, planned.vocabulary), *tokens(3, 5, planned.vocabulary))


def test_texts_and_missing_responses_raise() -> None:
    with pytest.raises(BadPlan, match="request 0 is a text"):
        tokens_of(plan(request(0, "hello")), request(0, "hello"), {})
    with pytest.raises(KeyError):
        tokens_of(chat_plan(), chat_plan().requests[2], {})
    with pytest.raises(BadPlan, match="the vocabulary has 1 entries"):
        Choices(1, 0)
