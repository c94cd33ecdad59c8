"""One hybrid engine under Poisson load, in simulated time: how many requests meet SLOs that it is not told.

The device is not the cost model that the engine plans with. Its prompts cost less than linear, its decodes
more, its steps vary by a tenth, and the worker starts with costs that are too high by a fifth, which live
steps correct. Numbers are those of 42M parameters in float32 on two cores with AVX2, rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from baton.core.step_cost import CostCorrection, StepCostModel, StepWork
from baton.core.step_targets import DEFAULT_FACTORS
from baton.engine.engine import Engine, EngineConfig, unknown_costs
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.step import SampledToken, StepPlan, StepResult
from baton.worker.costs.step_cost_keeper import work_of
from tests.builders import sequence_request
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized

pytestmark = [pytest.mark.sim, pytest.mark.slow]

PROMPT_TOKENS, ANSWER_TOKENS = 1024, 64
BLOCK = 16
COSTS = StepCostModel(
    step_s=6e-3, prefill_token_s=5.7e-4, prefill_attended_s=4e-8, decode_seq_s=2.9e-3, decode_context_s=1e-7
)
"""What the engine is told at its start."""


def device_step_s(work: StepWork) -> float:
    """Return the duration of a step without noise, in seconds."""
    prefill_s = 6.4e-4 * work.num_prefill_tokens**0.95 + 4e-8 * work.prefill_attended_tokens
    return 5e-3 + prefill_s + 2e-3 * work.num_decode_seqs**1.05 + 1e-7 * work.decode_context_tokens


UNLOADED_TTFT_S = 2 * device_step_s(StepWork.of([(512, 256)]))
UNLOADED_TPOT_S = device_step_s(StepWork.of((), [PROMPT_TOKENS]))


@dataclass(slots=True)
class Run:
    """TTFT and TPOT of each response, and the time that all took, in seconds."""

    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    took_s: float = 0.0

    def attainment(self, ttft_times: float, tpot_times: float) -> float:
        """Return the share of responses within these multiples of the unloaded latencies."""
        ttft_is_met = np.array(self.ttfts_s) <= ttft_times * UNLOADED_TTFT_S
        return float(np.mean(ttft_is_met & (np.array(self.tpots_s) <= tpot_times * UNLOADED_TPOT_S)))


def run(
    is_balanced: bool,
    num_requests: int,
    per_s: float | None,
    *,
    answer_tokens: int = ANSWER_TOKENS,
    prompt_tokens: int = PROMPT_TOKENS,
    slos: Callable[[int], dict[str, float]] = lambda number: {},
    seed: int = 5,
) -> Run:
    """Run requests through one engine. `per_s`: requests per second; None: all at the start.

    Without `is_balanced`, prompts go first in every step. `slos`: SLO fields of each request.
    """
    rng, noise, now_s, at_s = Random(seed), Random(seed + 1), 0.0, 0.0
    correction = CostCorrection(COSTS)
    config = EngineConfig(
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=4096,
        block_size_tokens=BLOCK,
        max_waiting_seqs=10_000,
    )
    engine = Engine(
        config,
        BlockPool(64 * 256, BLOCK, FakeGenerationTable(64 * 256)),
        step_costs=(lambda: correction.costs) if is_balanced else unknown_costs,
        clock=lambda: now_s,
    )
    arrivals: list[float] = []
    for _ in range(num_requests):
        at_s += rng.expovariate(per_s) if per_s else 0.0
        arrivals.append(at_s)
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    added = 0
    while added < len(arrivals) or not engine.is_idle:
        if engine.is_idle:
            now_s = max(now_s, arrivals[added])
        while added < len(arrivals) and arrivals[added] <= now_s:
            request = sequence_request(
                added,
                [rng.randrange(4, 4096) for _ in range(prompt_tokens)],
                max_tokens=answer_tokens,
                sampling={"ignore_eos": True},
                block_size_tokens=BLOCK,
                waited_s=now_s - arrivals[added],
                **slos(added),
            )
            engine.add(request)
            added += 1
        plan = engine.plan()
        work = work_of(plan)
        step_s = device_step_s(work) * noise.lognormvariate(0.0, 0.1)
        correction.observe(work, step_s)
        now_s += step_s
        for seq_id in _sampled(engine, plan):
            first_s.setdefault(seq_id, now_s)
            last_s[seq_id] = now_s
        engine.apply(plan, _result(plan))
    return Run(
        ttfts_s=[first_s[number] - arrivals[number] for number in range(num_requests)],
        tpots_s=[(last_s[number] - first_s[number]) / (answer_tokens - 1) for number in range(num_requests)],
        took_s=now_s,
    )


def _sampled(engine: Engine, plan: StepPlan) -> list[int]:
    return [engine.seq_id_of(part.seq_id) for part in plan.sequences if part.sample is not None]


def _result(plan: StepPlan) -> StepResult:
    token = (SampledToken(sample_index=0, token_id=7),)
    return StepResult(
        step_id=plan.step_id, samples={part.seq_id: token for part in plan.sequences if part.sample is not None}
    )


@pytest.mark.parametrize(("per_s", "least"), [(0.5, 0.95), (0.8, 0.85), (1.1, 0.5)])
def test_more_responses_meet_a_balanced_slo_than_with_prompts_first(per_s: float, least: float) -> None:
    """The derived targets, at the rates at which prompts or decodes starved.

    The capacity is about 1.6 requests per second.
    """
    ttft, tpot = DEFAULT_FACTORS.ttft, DEFAULT_FACTORS.tpot
    balanced, prompts_first = (run(each, sized(50, 150), per_s).attainment(ttft, tpot) for each in (True, False))
    assert balanced >= least
    assert balanced >= prompts_first + 0.1


def test_low_load_meets_a_tight_ttft() -> None:
    """Prompts do not wait for their target while answers have time to spare."""
    found = run(True, sized(50, 150), 0.3)
    assert found.attainment(2, DEFAULT_FACTORS.tpot) >= 0.9


@pytest.mark.parametrize(("prompt_tokens", "answer_tokens", "num_requests"), [(128, 64, 64), (1024, 64, 60)])
def test_saturation_costs_at_most_a_twentieth_of_the_throughput(
    prompt_tokens: int, answer_tokens: int, num_requests: int
) -> None:
    lengths = {"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens}
    balanced_s, prompts_first_s = (run(each, num_requests, None, **lengths).took_s for each in (True, False))
    assert balanced_s <= 1.05 * prompts_first_s


def test_overload_delays_no_prompt_much_longer_than_prompts_first_does() -> None:
    """A third more than the capacity. Nearly all are late, but none waits for ever."""
    balanced, prompts_first = (run(each, sized(60, 150), 2.1) for each in (True, False))
    assert max(balanced.ttfts_s) <= 1.6 * max(prompts_first.ttfts_s)
    assert balanced.took_s <= 1.1 * prompts_first.took_s


def test_responses_with_an_slo_keep_it_among_others() -> None:
    """Every fourth request has a TPOT SLO of twice the unloaded one. Many of the others are slower."""
    slo_s = 2.0 * UNLOADED_TPOT_S
    tpots_s = np.array(run(True, 60, 0.5, slos=lambda number: {} if number % 4 else {"tpot_slo_s": slo_s}).tpots_s)
    keeping, others = tpots_s[::4], np.delete(tpots_s, slice(None, None, 4))
    assert np.mean(keeping <= slo_s) >= 0.95
    assert np.mean(others <= slo_s) < 0.8
