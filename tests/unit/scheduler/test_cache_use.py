"""Reused prompt tokens of completed requests by worker and tier, and their ceiling."""

from dataclasses import replace

from baton.core.cluster.cache_stats import CacheStats, TokenReuse
from baton.core.ids import DecisionId
from baton.core.request import RequestActuals
from baton.prefix_index.eviction_record import EvictionRecord
from baton.scheduler.decisions.cache_use import MAX_WORKERS, CacheUseCounter
from baton.scheduler.decisions.missing_prefixes import MissingPrefixes
from baton.scheduler.state.open_placements import OpenPlacement
from tests.builders import placement
from tests.unit.scheduler.test_missing_prefixes import CHAIN, TOKENS, asked, decided, held


def ended(worker_id: str = "w0", *, num_prompt_tokens: int = 100, ceiling_tokens: float = 0.0) -> OpenPlacement:
    return OpenPlacement(placement(worker_id, "d"), num_prompt_tokens, ceiling_tokens=ceiling_tokens)


def actuals(outcome: str = "finished", **cached: int) -> RequestActuals:
    return RequestActuals(decision_id=DecisionId("d0"), outcome=outcome, cached_tokens_by_tier=cached)


def test_tokens_are_counted_by_worker_and_tier() -> None:
    counter = CacheUseCounter(now_s=5.0)
    counter.finished(ended("w1", ceiling_tokens=64.0), actuals(device=32, disk=16))
    counter.finished(ended("w0"), actuals())
    counter.finished(ended("w1", ceiling_tokens=64.0), actuals(host=8, other_release=7))
    counter.finished(ended("w1", ceiling_tokens=64.0), actuals("worker_lost", host=8))
    stats = counter.stats(now_s=12.0)
    w0 = TokenReuse(worker_id="w0", num_requests=1, num_prompt_tokens=100)
    w1 = TokenReuse(
        worker_id="w1", num_requests=2, num_prompt_tokens=200, cached_tokens={"device": 32, "disk": 16, "host": 8}
    )
    assert (stats.workers, stats.total) == ((w0, w1), TokenReuse() + w0 + w1)
    assert (stats.since_s, stats.ceiling_tokens, stats.sampled_share) == (7.0, 128.0, 1.0)


def test_number_of_workers_is_bounded() -> None:
    counter = CacheUseCounter(now_s=0.0)
    for number in range(MAX_WORKERS + 1):
        counter.finished(ended(f"w{number}"), actuals())
    stats = counter.stats(now_s=0.0)
    assert len(stats.workers) == MAX_WORKERS
    assert stats.total.num_requests == MAX_WORKERS + 1


def test_ceiling_is_what_earlier_prompts_had() -> None:
    counter = CacheUseCounter(now_s=0.0)
    assert counter.placed(decided(asked())) == 0
    assert counter.placed(decided(asked())) == 16 * 20
    assert counter.placed(decided(asked(TOKENS[: 16 * 20]))) == 16 * 19  # the last token is always computed
    assert counter.placed(decided(asked(salt="other tenant"))) == 0


def test_ceiling_has_answers_that_a_worker_holds_or_has_evicted() -> None:
    counter, evictions = CacheUseCounter(now_s=0.0), EvictionRecord()
    assert counter.placed(decided(asked(), {"w2": held(12)})) == 16 * 12
    evictions.add("w2", [CHAIN[14]], 1.0)
    evicted = MissingPrefixes(evictions)
    other = CacheUseCounter(now_s=0.0)
    decision = decided(asked(), {"w0": held(4)}, prefill_overlap_blocks=4)
    explained = evicted.explain(decision, 2.0)
    assert explained is not None
    assert other.placed(replace(decision, missing=explained)) == 16 * 15


def test_stats_of_several_schedulers_are_added() -> None:
    use = TokenReuse(worker_id="w0", num_requests=1, num_prompt_tokens=100, cached_tokens={"host": 16})
    one = CacheStats(since_s=3.0, total=use, workers=(use,), ceiling_tokens=20.0, sampled_share=0.5)
    both = CacheStats.merged([one, CacheStats(since_s=9.0), one])
    assert both.workers == (use + use,)
    assert both.total.cached_tokens == {"host": 32}
    assert (both.since_s, both.ceiling_tokens, both.sampled_share) == (9.0, 40.0, 0.5)
