"""Sessions whose working set is 1.5 times all tiers, on a simulated worker."""

from functools import cache

import pytest

from bench.scenarios.cluster.session_cache import Figures, Setup, figures, setup
from bench.support.sessions.session_sim import ONE_OFF_TOKENS, Eviction, SimTiers, flood, play
from tests.scale import sized

pytestmark = [pytest.mark.sim, pytest.mark.slow]

RETAINED_BLOCKS = 24


@cache
def given() -> Setup:
    return setup(seconds=sized(150.0, 600.0), workers=1, ratio=1.5, seed=sized(2, 1))


@cache
def played(eviction: Eviction) -> Figures:
    return figures(given(), play(given().plan, given().tiers, eviction))


def test_hits_are_near_those_of_an_ideal_cache() -> None:
    assert played("value").share_of_bound >= 0.86


@pytest.mark.long
def test_median_ttft_is_below_that_of_lru() -> None:
    assert played("value").median_ttft_s <= 0.7 * played("lru").median_ttft_s


@pytest.mark.long
def test_sessions_stay_with_their_worker_while_caches_are_full() -> None:
    """The bound is that of one cache of the size of both. Hits are 66 % without a charge for evicted KV."""
    two = setup(seconds=300.0, workers=2, ratio=1.5, seed=1)
    assert figures(two, play(two.plan, two.tiers, "value", seed=1)).share_of_bound >= 0.8


@pytest.mark.parametrize("eviction", ["value", "lru"])
def test_retained_prefix_survives_a_flood_that_gets_no_more_than_the_budget(eviction: Eviction) -> None:
    """All one-off prompts ask for retention, too, and come before the session's next turn."""
    tiers = SimTiers(workers=1, device_blocks=100, host_blocks=100, retain_blocks=RETAINED_BLOCKS)
    num_prompts = 3 * tiers.num_tokens // ONE_OFF_TOKENS
    kept = flood(tiers, eviction, retain_s=600.0, num_prompts=num_prompts)
    assert kept.hit_ratio == 1.0
    assert kept.most_retained_blocks <= RETAINED_BLOCKS
    lost = flood(tiers, "lru", retain_s=None, num_prompts=num_prompts)
    assert lost.hit_ratio < 1.0
