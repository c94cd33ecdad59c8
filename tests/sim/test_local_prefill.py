"""A decode worker computes prompts while the only prefill worker is saturated.

The device is not the cost model that predicts (`tests.sim.test_tpot_prediction`).
"""

import asyncio
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from baton.core.client_api import Timeline
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from tests.scale import sized
from tests.sim.storm_cluster import config
from tests.sim.test_tpot_prediction import PROMPT_S, UnevenCost, generate

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SATURATED_S, IDLE_S = sized(4.0, 60.0), sized(6.0, 60.0)


def timelines(policy: str, prefill_load: float, seconds: float, seed: int = 3) -> list[Timeline]:
    """Return the timelines of requests that arrive at random.

    prefill_load: seconds of prompts that arrive per second, by the time that one takes alone.
    seconds: time in which requests arrive.
    """

    async def main() -> list[Timeline]:
        settings = replace(config(policy), prefill=1, decode=1, hybrid=0, max_num_seqs=64)
        cluster = SimCluster(settings, SimModel(step=UnevenCost(), num_blocks=2000), seed=seed)
        await cluster.start()
        await asyncio.sleep(2.0)
        rng, at_s, requests = Random(seed), 2.0, []
        while (at_s := at_s + rng.expovariate(prefill_load / PROMPT_S)) < 2.0 + seconds:
            requests.append(generate(cluster, at_s, rng))
        answers = await asyncio.gather(*requests)
        await cluster.aclose()
        return answers

    return virtual_time.run(main())


def num_local(found: list[Timeline]) -> int:
    """Return how many prompts the decode worker has computed."""
    return sum(len(timeline.legs) == 1 for timeline in found)


def test_decode_worker_computes_prompts_when_the_prefill_worker_is_saturated() -> None:
    """`prefix_aware` never lets it. TPOT stays within its target, three times 8 ms."""
    by_kv, by_prefix = (timelines(policy, 1.2, SATURATED_S) for policy in ("kv_centric", "prefix_aware"))
    assert num_local(by_kv) >= 0.1 * len(by_kv)
    assert num_local(by_prefix) == 0
    ttfts_s, elsewhere_s = ([timeline.ttft_s or 0.0 for timeline in found] for found in (by_kv, by_prefix))
    assert np.percentile(ttfts_s, 90) < 0.6 * np.percentile(elsewhere_s, 90)
    assert np.percentile([timeline.tpot_s or 0.0 for timeline in by_kv], 90) < 0.026


def test_decode_worker_leaves_most_prompts_to_an_idle_prefill_worker() -> None:
    """It computes a prompt only while it has little else to do, so its answers hardly notice."""
    found = timelines("kv_centric", 0.2, IDLE_S)
    assert num_local(found) <= 0.4 * len(found)
    assert np.percentile([timeline.tpot_s or 0.0 for timeline in found], 90) < 0.013
