"""Prefix hits against what a plan allows: cold, warm and unknown caches."""

import pytest

from loadgen.measure.prefix_hits import CacheState, best_ratios, judge_cache
from loadgen.measure.records import Record
from tests.loadgen_builders import record
from tests.unit.loadgen.plans import chat_plan, plan, request

DISTINCT = plan(*(request(i, (i, 100)) for i in range(4)))
SHARED = plan(*(request(i, (99, 80), (i, 20)) for i in range(4)))


def served(hits: list[int], prompts: int | list[int] = 100, **changes: object) -> list[Record]:
    counts = prompts if isinstance(prompts, list) else [prompts] * len(hits)
    return [
        record(index, num_cached_tokens=hit, num_prompt_tokens=count, **changes)
        for index, (hit, count) in enumerate(zip(hits, counts, strict=True))
    ]


def test_hits_that_the_plan_allows_are_cold() -> None:
    found = judge_cache(served([0, 80, 80, 80]), SHARED)
    assert (found.state, found.num_hit_tokens, found.num_allowed_tokens) == (CacheState.COLD, 240, 240)
    assert found.text == ""


def test_hits_of_an_earlier_run_are_warm() -> None:
    """The same plan again: every prompt but its last token is in the cache."""
    found = judge_cache(served([99] * 4), SHARED)
    assert (found.state, found.num_hit_tokens, found.num_allowed_tokens) == (CacheState.WARM, 396, 240)
    assert found.text.startswith("warm cache: 99 % of the prompt tokens were prefix hits")
    assert "at most 60 %" in found.text


@pytest.mark.parametrize(("extra", "state"), [(4, CacheState.COLD), (5, CacheState.WARM)])
def test_excess_counts_beyond_one_percent_of_the_prompt_tokens(extra: int, state: CacheState) -> None:
    assert judge_cache(served([extra, 80, 80, 80]), SHARED).state is state


def test_tokens_that_the_server_adds_may_all_be_hits() -> None:
    """A chat template of 20 tokens in front of distinct prompts."""
    assert judge_cache(served([20] * 4, prompts=120), DISTINCT).state is CacheState.COLD
    assert judge_cache(served([32] * 4, prompts=120), DISTINCT).state is CacheState.WARM


def test_allowed_hits_scale_with_the_servers_token_count() -> None:
    """Prompts sent as text that the server counts in half as many tokens."""
    assert judge_cache(served([0, 40, 40, 40], prompts=50), SHARED).state is CacheState.COLD
    assert judge_cache(served([40] * 4, prompts=50), SHARED).state is CacheState.WARM


def test_later_turns_may_hit_earlier_responses() -> None:
    assert judge_cache(served([0, 40, 70], prompts=[60, 70, 75]), chat_plan()).state is CacheState.COLD


def test_retried_requests_hit_their_own_first_attempt() -> None:
    retried = served([99], timeline={"attempts": 2})
    rest = [record(index, num_cached_tokens=0, num_prompt_tokens=100) for index in (1, 2, 3)]
    assert judge_cache([*retried, *rest], DISTINCT).state is CacheState.COLD
    once = served([99], timeline={"attempts": 1})
    assert judge_cache([*once, *rest], DISTINCT).state is CacheState.WARM


def test_cache_state_is_unknown_without_hits_or_tokens() -> None:
    silent = judge_cache([record(0, num_cached_tokens=None)], DISTINCT)
    assert silent.text == "not known whether the cache was warm: the server did not report cached prompt tokens"
    texts = plan(request(0, "hello"), request(1, "hello"))
    assert "request 0 is a text" in judge_cache(served([90, 90]), texts).text
    assert judge_cache(served([0, 1]), texts).state is CacheState.COLD, "no hits need no plan"
    assert judge_cache(served([90] * 5), DISTINCT).why.startswith("the stored plan is not that of the records")
    assert judge_cache(served([90] * 4), None, "plan.jsonl: broken").why == "plan.jsonl: broken"


def test_best_ratios_cover_the_reported_requests() -> None:
    records = [*served([0, 80]), record(2, num_cached_tokens=None)]
    found = best_ratios(records, SHARED, block_size_tokens=16, capacity_tokens=96)
    assert found == {"plan's best, infinite cache": 0.4, "plan's best, LRU of 96 tokens": 0.4}
    assert best_ratios(records, plan(request(0, "hello")), block_size_tokens=16, capacity_tokens=None) == {}
