"""One hybrid worker under Poisson load: predicted TPOT compared with the TPOT that clients get.

The device is not the cost model that predicts. Its steps are not linear in their work, they vary at random,
and the worker starts with costs that are too high by a third.
"""

import asyncio
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from baton.core.client_api import Caller, ChoiceDelta, Timeline
from baton.core.step_cost import StepCostModel
from baton.engine.state.step import StepPlan
from baton.gateway.input.client_call import Endpoint
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_executor import SimStepCost
from tests.scale import sized
from tests.sim.storm_cluster import config

pytestmark = [pytest.mark.sim, pytest.mark.slow]

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 24
PROMPT_S = 0.044
"""About what the device needs for a prompt."""
WARMUP_S, SECONDS = 10.0, sized(8.0, 120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenCost(SimStepCost):
    """A device with a fixed cost, a concave cost of prompt tokens, a convex cost of decodes, and noise."""

    base_s: float = 0.008

    @property
    def model(self) -> StepCostModel:
        """Costs as a calibration on a busier machine might find them: linear, and too high by a third."""
        return StepCostModel(
            step_s=0.011, prefill_token_s=6e-4, prefill_attended_s=0.0, decode_seq_s=3e-4, decode_context_s=0.0
        )

    def step_s(self, plan: StepPlan) -> float:
        decodes = sum(part.num_scheduled_tokens == 1 for part in plan.sequences)
        prefill_s = 7.2e-4 * (plan.num_tokens - decodes) ** 0.9
        noise = Random(plan.step_id).lognormvariate(0.0, 0.2)
        return (self.base_s + prefill_s + 6e-5 * decodes**1.3) * noise


class Ignored:
    """A client that reads nothing but the timeline."""

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        """Drop the delta."""


async def generate(cluster: SimCluster, at_s: float, rng: Random) -> Timeline:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, at_s - loop.time()))
    body = {
        "prompt": [rng.randrange(1, 250) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "timeline": True,
    }
    call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
    return (await cluster.gateway.run(call, Ignored())).timeline[0]


def timelines(prefill_load: float, seed: int = 3) -> list[Timeline]:
    """Return the timelines of requests that arrive at random, after the warmup.

    prefill_load: seconds of prompts that arrive per second.
    """

    async def main() -> list[Timeline]:
        settings = replace(config("kv_centric"), prefill=0, decode=0, hybrid=1, max_num_seqs=64)
        cluster = SimCluster(settings, SimModel(step=UnevenCost(), num_blocks=2000), seed=seed)
        await cluster.start()
        await asyncio.sleep(2.0)
        rng, at_s, requests = Random(seed), 2.0, []
        while (at_s := at_s + rng.expovariate(prefill_load / PROMPT_S)) < 2.0 + WARMUP_S + SECONDS:
            requests.append(generate(cluster, at_s, rng))
        answers = await asyncio.gather(*requests)
        await cluster.aclose()
        return answers[round(len(answers) * WARMUP_S / (WARMUP_S + SECONDS)) :]

    return virtual_time.run(main())


@pytest.mark.parametrize("prefill_load", [pytest.param(0.15, marks=pytest.mark.long), 0.6])
def test_tpot_prediction_is_near_the_actual_under_continuous_prompts(prefill_load: float) -> None:
    """From the prompts known at placement alone, a third of the actual TPOT is predicted at a load of 0.6."""
    ratios = [(timeline.predicted_tpot_s or 0) / (timeline.tpot_s or 1) for timeline in timelines(prefill_load)]
    assert 0.75 < np.median(ratios) < 1.25
    assert np.percentile(ratios, 10) > 0.6
    assert np.percentile(ratios, 90) < 1.4
