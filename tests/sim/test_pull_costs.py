"""Predicted prefix pulls compared with those that happen, where a pull costs much more than its bytes.

The scheduler is told nothing of the true delays of messages, reads and connections. It knows what the
workers have measured, and the device is not the cost model that predicts (`tests.sim.test_tpot_prediction`).
"""

import asyncio
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from unittest.mock import patch

import numpy as np
import pytest

from baton.core.client_api import Caller, Timeline
from baton.core.cluster.placement import Placement
from baton.core.cluster.worker_report import LinkReport
from baton.core.errors import Reason
from baton.core.ids import WorkerRef
from baton.gateway.input.client_call import Endpoint
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_network import Delays
from baton.sim.sim_transfer_backend import LinkModel
from baton.transfer.reader.transfer_observer import NoObserver
from tests.scale import sized
from tests.sim.storm_cluster import config
from tests.sim.test_tpot_prediction import Ignored, UnevenCost

pytestmark = [pytest.mark.sim, pytest.mark.slow]

PREFIX_TOKENS, PROMPT_TOKENS = 160, 184
NUM_PREFIXES, BURST = sized(25, 250), 6
HOLDER = "decode-0"
"""The decode worker holds all prefixes, and prefill workers pull them from it."""
LINK = LinkModel(latency_s=0.006, bytes_per_s=4e7, connect_s=0.04)
DELAYS = Delays(min_s=0.001, mean_s=0.001)
PULL_S = 2 * LINK.latency_s + 2 * (DELAYS.min_s + DELAYS.mean_s)
"""The truth: two reads one after the other, and a request with its answer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The predictions and the truth of a run.

    predicted: placements that pull a prefix, and the terms of the worker that pulls.
    actual_s: durations of these pulls by owner, first ones of a pair included.
    links: those of all workers in the end.
    """

    predicted: tuple[tuple[Placement, dict[str, float]], ...]
    actual_s: tuple[float, ...]
    links: tuple[LinkReport, ...]


async def predicted_pull(cluster: SimCluster, timeline: Timeline) -> tuple[Placement, dict[str, float]] | None:
    """Return an entry of `Outcome.predicted`, or None for a request that pulls no prefix."""
    (record,) = await cluster.schedulers["scheduler"].explain(bytes.fromhex(timeline.request_id))
    placed = record.placement
    if placed is None or placed.prefix_source is None or placed.prefix_source.worker.worker_id != HOLDER:
        return None
    return placed, next(c.terms for c in record.candidates if c.side == "prefill" and record.is_chosen(c))


async def request(cluster: SimCluster, at_s: float, prompt: list[int]) -> Timeline:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, at_s - loop.time()))
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "timeline": True}
    call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
    return (await cluster.gateway.run(call, Ignored())).timeline[0]


@cache
def simulated() -> Outcome:
    """Let one prefill worker compute a prefix, and then a burst of requests need it on all three."""

    actual_s: list[float] = []

    def pull_ended(
        _: NoObserver, owner: WorkerRef, *, reason: Reason | None, duration_s: float, **_rest: float
    ) -> None:
        if reason is None and owner.worker_id == HOLDER:
            actual_s.append(duration_s)

    async def main() -> Outcome:
        settings = replace(config("kv_centric"), prefill=3, decode=1, hybrid=0, max_num_seqs=64)
        model = SimModel(step=UnevenCost(), link=LINK, delays=DELAYS, num_blocks=400)
        cluster = SimCluster(settings, model, seed=5)
        await cluster.start()
        await asyncio.sleep(2.0)
        rng, requests = Random(5), []
        for number in range(NUM_PREFIXES):
            prefix = [rng.randrange(1, 250) for _ in range(PREFIX_TOKENS)]
            for after_s in (0.0, *(0.4 + rng.uniform(0.0, 0.01) for _ in range(BURST))):
                rest = [rng.randrange(1, 250) for _ in range(PROMPT_TOKENS - PREFIX_TOKENS)]
                requests.append(request(cluster, 2.0 + 0.6 * number + after_s, prefix + rest))
        timelines = await asyncio.gather(*requests)
        predicted = [await predicted_pull(cluster, timeline) for timeline in timelines]
        links = tuple(link for worker in cluster.workers.values() for link in worker.reader.links())
        await cluster.aclose()
        return Outcome(
            predicted=tuple(each for each in predicted if each is not None), actual_s=tuple(actual_s), links=links
        )

    with patch.object(NoObserver, "pull_ended", pull_ended):
        return virtual_time.run(main())


def test_workers_learn_what_pulls_cost_beyond_their_bytes() -> None:
    """The latency of reads is in part in the speed of a link, because it is measured over them."""
    links = simulated().links
    pull_s = [link.pull_s for link in links if link.pull_s]
    assert len(pull_s) >= 2
    assert 0.5 * PULL_S < np.median(pull_s) < 1.2 * PULL_S
    exposed_s = [link.exposed_s for link in links if link.exposed_s]
    assert 0.4 * LINK.latency_s < np.median(exposed_s) < 2.4 * LINK.latency_s
    assert all(LINK.connect_s < link.dial_s < 2 * LINK.connect_s for link in links)


def test_pulls_take_as_long_as_predicted() -> None:
    """Without what the links have measured beyond the bytes, they would be predicted too short."""
    run = simulated()
    connected = [(placed.prefix_pull_s or 0.0, terms) for placed, terms in run.predicted if not terms["dial_s"]]
    assert len(connected) >= 15
    assert len(run.actual_s) >= 15
    predicted_s, actual_s = np.median([pull_s for pull_s, _ in connected]), np.median(run.actual_s)
    assert predicted_s == pytest.approx(actual_s, rel=0.2)
    assert np.median([pull_s - terms["pull_fixed_s"] for pull_s, terms in connected]) < 0.8 * actual_s


def test_first_pulls_of_pairs_are_charged_the_connection() -> None:
    first = [terms["dial_s"] for _, terms in simulated().predicted if terms["dial_s"]]
    assert first
    assert all(dial_s >= LINK.connect_s for dial_s in first)
