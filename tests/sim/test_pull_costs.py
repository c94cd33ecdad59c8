"""Predicted prefix pulls compared with those that happen, where a pull costs much more than its bytes.

The scheduler is told nothing of the true delays of messages, reads and connections. It knows what the
workers have measured, and the device is not the cost model that predicts (`tests.sim.test_tpot_prediction`).
"""

import asyncio
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import numpy as np
import pytest

from baton.core.client_api import Caller, Timeline
from baton.core.cluster.placement import Placement
from baton.core.cluster.worker_report import LinkReport
from baton.gateway.input.client_call import Endpoint
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_network import Delays
from baton.sim.sim_transfer_backend import LinkModel
from tests.scale import sized
from tests.sim.storm_cluster import config
from tests.sim.test_tpot_prediction import Ignored, UnevenCost

pytestmark = [pytest.mark.sim, pytest.mark.slow]

SECONDS = sized(20.0, 200.0)
PREFIX_TOKENS, PROMPT_TOKENS, NUM_PREFIXES = 160, 184, 12
LINK = LinkModel(latency_s=0.006, bytes_per_s=4e7, connect_s=0.04)
DELAYS = Delays(min_s=0.001, mean_s=0.001)
PULL_S = 2 * LINK.latency_s + 2 * (DELAYS.min_s + DELAYS.mean_s)
"""The truth: two reads one after the other, and a request with its answer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the pulls of a run were predicted to cost, and did cost.

    pulls: the placement, the terms of the worker that pulled, and its time before it computed.
    links: those of all workers in the end.
    """

    pulls: tuple[tuple[Placement, dict[str, float], float], ...]
    links: tuple[LinkReport, ...]


async def pulled_before(cluster: SimCluster, timeline: Timeline) -> tuple[Placement, dict[str, float], float] | None:
    """Return an entry of `Outcome.pulls`, or None for a request that pulled no prefix to an idle worker."""
    (record,) = await cluster.schedulers["scheduler"].explain(bytes.fromhex(timeline.request_id))
    placed = record.placement
    if placed is None or placed.prefix_source is None or placed.queue_s or placed.prefill is None:
        return None
    terms = next(c.terms for c in record.candidates if c.side == "prefill" and record.is_chosen(c))
    return placed, terms, next(leg.queue_s for leg in timeline.legs if leg.worker_id == placed.prefill.worker_id)


async def request(cluster: SimCluster, at_s: float, prompt: list[int]) -> Timeline:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, at_s - loop.time()))
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "timeline": True}
    call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
    return (await cluster.gateway.run(call, Ignored())).timeline[0]


@cache
def simulated() -> Outcome:
    """Run requests with shared prefixes on three prefill workers."""

    async def main() -> Outcome:
        settings = replace(config("kv_centric"), prefill=3, decode=1, hybrid=0, max_num_seqs=64)
        model = SimModel(step=UnevenCost(), link=LINK, delays=DELAYS, num_blocks=400)
        cluster = SimCluster(settings, model, seed=5)
        await cluster.start()
        await asyncio.sleep(2.0)
        rng, at_s, requests = Random(5), 2.0, []
        prefixes = [[rng.randrange(1, 250) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
        while (at_s := at_s + rng.expovariate(20.0)) < 2.0 + SECONDS:
            rest = [rng.randrange(1, 250) for _ in range(PROMPT_TOKENS - PREFIX_TOKENS)]
            requests.append(request(cluster, at_s, rng.choice(prefixes) + rest))
        timelines = await asyncio.gather(*requests)
        pulls = [await pulled_before(cluster, timeline) for timeline in timelines]
        links = tuple(link for worker in cluster.workers.values() for link in worker.reader.links())
        await cluster.aclose()
        return Outcome(pulls=tuple(pull for pull in pulls if pull is not None), links=links)

    return virtual_time.run(main())


def test_workers_learn_what_pulls_cost_beyond_their_bytes() -> None:
    links = simulated().links
    pull_s = [link.pull_s for link in links if link.pull_s]
    assert len(pull_s) >= 3
    assert np.median(pull_s) == pytest.approx(PULL_S, rel=0.3)
    exposed_s = [link.exposed_s for link in links if link.exposed_s]
    assert np.median(exposed_s) == pytest.approx(2 * LINK.latency_s, rel=0.3)
    assert all(link.dial_s == pytest.approx(LINK.connect_s + LINK.latency_s, rel=0.5) for link in links)


def test_pulls_take_as_long_as_predicted() -> None:
    """Predicted from their bytes alone, these pulls take several times as long."""
    pulls = simulated().pulls
    ratios = [(placed.prefix_pull_s or 0.0) / actual_s for placed, terms, actual_s in pulls if not terms["dial_s"]]
    assert len(ratios) >= 20
    assert 0.7 < np.median(ratios) < 1.3
    assert np.percentile(ratios, 90) < 1.6
    alone = [((placed.prefix_pull_s or 0.0) - terms["pull_fixed_s"]) / actual_s for placed, terms, actual_s in pulls]
    assert np.median(alone) < 0.6


def test_first_pulls_of_pairs_are_charged_the_connection() -> None:
    first = [terms["dial_s"] for _, terms, _ in simulated().pulls if terms["dial_s"]]
    assert first
    assert all(dial_s >= LINK.connect_s for dial_s in first)
