"""The best hits of a plan, by hand and compared with a cache that stores real tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.cache_model import best_hits, in_planned_order
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.plan.prompt_tokens import tokens_of
from tests.unit.loadgen.plans import chat_plan, plan, request


def test_shared_prefixes_match_values_by_hand() -> None:
    planned = plan(
        request(0, (0, 40), (1, 20)),
        request(1, (0, 40), (2, 30)),
        request(2, (0, 30)),
        request(3, (0, 50)),
        request(4, (0, 40), (1, 20)),
    )
    use = best_hits(planned)
    assert use.num_prompt_tokens == (60, 70, 30, 50, 60)
    assert use.num_shared_tokens == (0, 40, 30, 40, 60)
    assert use.num_cached_tokens == (0, 40, 29, 40, 59)
    assert sum(use.num_shared_tokens) / sum(use.num_prompt_tokens) == 170 / 270
    assert use.hit_ratio == 168 / 270


def test_only_full_blocks_are_cached() -> None:
    planned = plan(
        request(0, (0, 40), (1, 20)),
        request(1, (0, 40), (2, 30)),
        request(2, (0, 40), (1, 8)),
        request(3, (0, 40), (1, 20), (3, 9)),
    )
    use = best_hits(planned, block_size_tokens=16)
    assert use.num_shared_tokens == (0, 32, 48, 48)
    assert use.num_cached_tokens == (0, 32, 32, 48), "of 48 tokens the last is computed, and with it its block"


def test_responses_are_cached_for_later_turns() -> None:
    """Turn 2 has 40 + 20 + 10 + 5 tokens; the last token of the response of 10 was never computed."""
    assert best_hits(chat_plan()).num_shared_tokens == (0, 40, 69)
    assert best_hits(chat_plan(), block_size_tokens=16).num_shared_tokens == (0, 32, 64)


def test_cancelled_response_caches_fewer_tokens() -> None:
    planned = plan(
        request(0, (0, 10), session="s", output=10, cancel_after_tokens=4),
        request(1, (0, 10), 0, (1, 5), session="s", turn=1, after=0),
    )
    assert best_hits(planned).num_shared_tokens == (0, 13)


def test_exact_tokens_are_compared_one_by_one() -> None:
    planned = plan(
        request(0, [1, 2, 3, 4, 5]),
        request(1, [1, 2, 3, 9, 5]),
        request(2, [1, 2], [3, 9, 5, 6]),
        request(3, [1, 2, 3, 9, 7]),
    )
    assert best_hits(planned).num_shared_tokens == (0, 3, 5, 4)
    assert best_hits(planned, block_size_tokens=2).num_shared_tokens == (0, 2, 4, 4)
    assert best_hits(planned, block_size_tokens=4).num_shared_tokens == (0, 0, 4, 4), (
        "a block in which two segments meet"
    )


def test_least_recently_used_block_is_evicted_first() -> None:
    a, b, c = (0, 16), (1, 16), (2, 16)
    planned = plan(*(request(i, part, output=1) for i, part in enumerate([a, b, a, c, a, b])))
    assert best_hits(planned, block_size_tokens=16, capacity_tokens=32).num_shared_tokens == (0, 0, 16, 0, 16, 0)
    assert best_hits(planned, block_size_tokens=16, capacity_tokens=48).num_shared_tokens == (0, 0, 16, 0, 16, 16)


def test_last_blocks_of_a_prompt_are_evicted_first() -> None:
    planned = plan(request(0, (0, 64), output=1), request(1, (1, 32), output=1), request(2, (0, 64), output=1))
    assert best_hits(planned, block_size_tokens=16, capacity_tokens=64).num_shared_tokens == (0, 0, 32)


def test_reused_prefix_is_kept_and_its_rest_evicted() -> None:
    """Request 2 reuses the first half of prompt 0. Its second half is then the oldest and is evicted for
    request 3."""
    planned = plan(
        *(request(i, part, output=1) for i, part in enumerate([(0, 64), (1, 32), (0, 32), (2, 32), (1, 32), (0, 64)]))
    )
    assert best_hits(planned, block_size_tokens=16, capacity_tokens=96).num_shared_tokens == (0, 0, 32, 0, 32, 32)


def test_turns_are_replayed_at_their_due_times() -> None:
    """Turn 2 is planned after request 1, which owns the only cache block by then."""
    assert [r.index for r in in_planned_order(chat_plan())] == [0, 1, 2]
    early = plan(
        request(0, (0, 4), session="s"),
        request(1, (1, 4), at_s=5.0),
        request(2, (0, 4), 0, session="s", turn=1, after=0, think_s=0.5),
    )
    assert [r.index for r in in_planned_order(early)] == [0, 2, 1]


def test_texts_and_impossible_sizes_are_rejected() -> None:
    with pytest.raises(BadPlan, match="request 0 is a text"):
        best_hits(plan(request(0, "hello")))
    with pytest.raises(BadPlan, match="the cache size is 8 tokens; it must hold at least one block of 16"):
        best_hits(chat_plan(), block_size_tokens=16, capacity_tokens=8)
    with pytest.raises(BadPlan, match="the block size is 0 tokens"):
        best_hits(chat_plan(), block_size_tokens=0)


class TokenCache:
    """A reference cache with real tokens in a dict of blocks and a linear search for the victim."""

    def __init__(self, block_size: int, capacity_blocks: int | None) -> None:
        self.block_size, self.capacity = block_size, capacity_blocks
        self.used: dict[tuple[int, ...], int] = {}  # a block by all tokens up to its end

    def use(self, tokens: Sequence[int], now: int) -> int:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        blocks = [tuple(tokens[:end]) for end in ends]
        found = next((i for i, block in enumerate(blocks) if block not in self.used), len(blocks))
        self.used.update(dict.fromkeys(blocks, now))
        while self.capacity is not None and len(self.used) > self.capacity:
            del self.used[min(self.used, key=lambda block: (self.used[block], -len(block)))]
        return found


def by_tokens(planned: Plan, block_size: int, capacity_tokens: int | None) -> list[int]:
    cache = TokenCache(block_size, None if capacity_tokens is None else capacity_tokens // block_size)
    answers = {
        r.index: tuple(range(10_000 + 100 * r.index, 10_000 + 100 * r.index + r.output_tokens))
        for r in planned.requests
    }
    found = [0] * len(planned.requests)
    for now, r in enumerate(in_planned_order(planned)):
        prompt = tokens_of(planned, r, answers)
        shared = cache.use([*prompt, *answers[r.index][: (r.cancel_after_tokens or r.output_tokens) - 1]], now)
        found[r.index] = min(shared, len(prompt) // block_size) * block_size
    return found


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans with few ids and short lengths, so that much is shared."""
    requests: list[PlannedRequest] = []
    for index in range(draw(st.integers(1, 10))):
        own = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=3))
        fields: dict[str, Any] = {"output": draw(st.integers(1, 9))}
        earlier = draw(st.none() | st.sampled_from(requests)) if requests else None
        if earlier is None:
            requests.append(request(index, *own, session=f"s{index}", **fields))
            continue
        planned = request(
            index,
            *own,
            session=earlier.session,
            turn=earlier.turn + 1,
            after=earlier.index,
            think_s=draw(st.floats(0, 5)),
            **fields,
        )
        answer = request(index, earlier.index, after=0).segments
        requests.append(
            PlannedRequest(
                index=index,
                segments=(*earlier.segments, *answer, *planned.segments),
                output_tokens=planned.output_tokens,
                after=planned.after,
                think_s=planned.think_s,
                session=planned.session,
                turn=planned.turn,
            )
        )
    return plan(*requests)


@settings(max_examples=100, deadline=None)
@given(plans(), st.sampled_from([1, 2, 4, 5, 16]), st.none() | st.integers(16, 60))
def test_model_agrees_with_a_token_cache(planned: Plan, block_size: int, capacity_tokens: int | None) -> None:
    use = best_hits(planned, block_size_tokens=block_size, capacity_tokens=capacity_tokens)
    assert list(use.num_shared_tokens) == by_tokens(planned, block_size, capacity_tokens)


EXACT_PROMPTS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=3), min_size=1, max_size=12
)


@settings(deadline=None)
@given(EXACT_PROMPTS, st.integers(1, 4), st.none() | st.integers(4, 30))
def test_model_agrees_with_a_token_cache_for_exact_tokens(
    prompts: list[list[list[int]]], block_size: int, capacity_tokens: int | None
) -> None:
    planned = plan(*(request(i, *prompt, output=1) for i, prompt in enumerate(prompts)))
    use = best_hits(planned, block_size_tokens=block_size, capacity_tokens=capacity_tokens)
    assert list(use.num_shared_tokens) == by_tokens(planned, block_size, capacity_tokens)
