"""Ten times the capacity of a cluster for a minute: admitted requests meet their SLOs (F-43)."""

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from baton.core.client_api import Caller, ChoiceDelta
from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.runtime.config.settings import ClusterConfig
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_executor import SimStepCost
from tests.scale import sized
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

MODEL = SimModel(step=SimStepCost(base_s=0.01, per_token_s=0.001))
CAPACITY_PER_S = 25.0
"""Slightly less than two prefill workers can do: each takes 70 ms for a prompt of 60 tokens."""
PROMPT_TOKENS, OUTPUT_TOKENS = 60, 20
TTFT_SLO_S, TPOT_SLO_S = 0.6, 0.05
OVERLOAD_S = sized(2.0, 60.0)
SETTLED_S = sized(3.0, 5.0)


@dataclass(slots=True)
class OverloadRequest:
    """One request. `refused`: (seconds until the rejection, reason, seconds to wait)."""

    at_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    refused: tuple[float, str, float] | None = None

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        if choice.token_ids:
            now_s = asyncio.get_running_loop().time()
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
            self.num_tokens += len(choice.token_ids)

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_s is None else self.first_s - self.at_s

    @property
    def is_good(self) -> bool:
        if self.first_s is None or self.num_tokens < OUTPUT_TOKENS:
            return False
        return self.ttft_s <= TTFT_SLO_S and (self.last_s - self.first_s) / (OUTPUT_TOKENS - 1) <= TPOT_SLO_S


async def send(cluster: SimCluster, request: OverloadRequest, rng: Random) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, request.at_s - loop.time()))
    body = {
        "prompt": [rng.randrange(1, 250) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "slo": {"ttft_ms": TTFT_SLO_S * 1000, "tpot_ms": TPOT_SLO_S * 1000},
    }
    try:
        call = await cluster.gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
        await cluster.gateway.run(call, request)
    except Refused as refused:
        failure = refused.failure
        request.refused = (loop.time() - request.at_s, failure.reason.value, failure.retry_after_s or 0.0)


def offered(per_s: float, begin_s: float, end_s: float, rng: Random) -> list[OverloadRequest]:
    """Draw Poisson arrivals."""
    drawn, at_s = [], begin_s
    while (at_s := at_s + rng.expovariate(per_s)) < end_s:
        drawn.append(OverloadRequest(at_s=at_s))
    return drawn


def run(shape: ClusterConfig, *phases: tuple[float, float]) -> list[list[OverloadRequest]]:
    """Run phases of (requests per second, seconds) and return the requests of each."""

    async def main() -> list[list[OverloadRequest]]:
        rng = Random(7)
        cluster = SimCluster(shape, MODEL, seed=3)
        await cluster.start()
        begin_s, sent = 3.0, []
        for per_s, seconds in phases:
            sent.append(offered(per_s, begin_s, begin_s + seconds, rng))
            begin_s += seconds
        await asyncio.gather(*(send(cluster, request, rng) for phase in sent for request in phase))
        await cluster.aclose()
        return sent

    return virtual_time.run(main())


def shape(admission: str) -> ClusterConfig:
    return replace(config("kv_centric"), admission=admission, max_open_requests=100_000)  # type: ignore[arg-type]


def goodput_per_s(requests: list[OverloadRequest], seconds: float) -> float:
    return sum(one.is_good for one in requests) / seconds


@pytest.mark.slow
@pytest.mark.fault("F-43")
def test_goodput_holds_and_surplus_is_rejected_immediately() -> None:
    normal_s = sized(4.0, 6.0)
    at_capacity, overload, _, after = run(
        shape("predictive"),
        (CAPACITY_PER_S, normal_s),
        (10 * CAPACITY_PER_S, OVERLOAD_S),
        (CAPACITY_PER_S / 2, SETTLED_S),
        (CAPACITY_PER_S / 2, normal_s),
    )
    assert goodput_per_s(overload, OVERLOAD_S) >= 0.9 * goodput_per_s(at_capacity, normal_s)
    refused = [one.refused for one in overload if one.refused is not None]
    assert len(refused) > 0.8 * len(overload)
    reasons = Counter(reason for _, reason, _ in refused)
    assert reasons.keys() <= {"ttft_slo", "tpot_slo", "queue_full"}
    assert all(retry_s > 0 for _, _, retry_s in refused)
    within_50_ms = sum(seconds <= 0.05 for seconds, _, _ in refused)
    assert within_50_ms >= 0.95 * len(refused), sorted(seconds for seconds, _, _ in refused)[-20:]
    admitted = sorted(one.ttft_s for one in overload if one.first_s is not None)
    assert admitted[int(0.99 * len(admitted))] <= 2 * TTFT_SLO_S
    assert all(one.is_good for one in after), "the cluster has recovered"
