"""Timelines compared with what clients measured, over slow messages so that legs overtake each other."""

import asyncio
from dataclasses import dataclass, field

import pytest

from baton.core.client_api import Caller, ChoiceDelta, Timeline
from baton.gateway.gateway_service import GatewayService
from baton.gateway.input.client_call import Endpoint
from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_network import Delays
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

SLOW = SimModel(delays=Delays(mean_s=0.02))
NUM_REQUESTS = 40


@dataclass(slots=True)
class ArrivalRecorder:
    """A client that records when how many tokens arrive."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)

    async def begin(self) -> None:
        """Prepare nothing."""

    def put(self, choice: ChoiceDelta) -> None:
        if choice.token_ids:
            self.arrivals.append((asyncio.get_running_loop().time(), len(choice.token_ids)))

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def tpot_s(self) -> float | None:
        """TPOT by the client's clock."""
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None


async def generate(gateway: GatewayService, number: int, max_tokens: int) -> tuple[ArrivalRecorder, Timeline, int]:
    """Return (what the client received, the timeline, cached tokens)."""
    loop, received = asyncio.get_running_loop(), ArrivalRecorder()
    prompt = [1 + (number * 7 + index) % 200 for index in range(30)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "timeline": True}
    call = await gateway.validator.call(Endpoint.COMPLETIONS, body, Caller(), received_s=loop.time())
    ending = await gateway.run(call, received)
    return received, ending.timeline[0], ending.usage.num_cached_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 12])
def test_timeline_has_all_legs_and_the_tpot_that_the_client_measured(max_tokens: int) -> None:
    async def main() -> None:
        cluster = SimCluster(config(), SLOW, seed=max_tokens)
        await cluster.start()
        await asyncio.sleep(2.0)
        answers = await asyncio.gather(
            *(generate(cluster.gateway, number, max_tokens) for number in range(NUM_REQUESTS))
        )
        await asyncio.sleep(10.0)  # until the scheduler has all outcomes
        for received, timeline, _ in answers:
            roles = [leg.worker_id.split("-")[0] for leg in timeline.legs]
            assert roles == (["prefill", "decode"] if max_tokens > 1 else ["prefill"])
            assert (timeline.attempts, received.num_tokens) == (1, max_tokens)
            assert timeline.tpot_s == pytest.approx(received.tpot_s)
            assert timeline.ttft_s is not None
            assert 0 < timeline.placed_s < timeline.ttft_s <= timeline.total_s
            (record,) = await cluster.gateway.schedulers.explain(bytes.fromhex(timeline.request_id))
            assert [leg["worker_id"] for leg in record.actuals["legs"]] == [leg.worker_id for leg in timeline.legs]
            assert (record.actuals["tpot_s"], record.actuals["num_output_tokens"]) == (timeline.tpot_s, max_tokens)
        repeated = [
            await generate(cluster.gateway, 0, max_tokens) for _ in range(3)
        ]  # with two workers, one gets the prompt twice
        cached = [(num_cached, timeline.legs[0].num_cached_tokens) for _, timeline, num_cached in repeated]
        assert (24, 24) in cached
        assert all(counted == computed for counted, computed in cached)
        await cluster.aclose()

    virtual_time.run(main())
