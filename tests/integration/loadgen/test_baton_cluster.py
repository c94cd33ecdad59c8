"""One plan over HTTP and over gRPC, each on a fresh cluster, gives the same tokens and cache hits."""

from itertools import pairwise
from pathlib import Path

import pytest

from loadgen.measure.prefix_hits import CacheState, judge_cache
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.measure.timeline import Stages
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.send.target import Target
from tests.cluster import process_cluster
from tests.integration.loadgen.rig import Measured, measure
from tests.times import LONG_TIMES
from tests.unit.loadgen.plans import plan, request

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK = 16
PROMPTS = (
    ((0, 300), (10, 40)),  # new
    ((0, 300), (11, 25)),  # shares 300 tokens
    ((1, 130), (12, 9)),  # new
    ((0, 300), (10, 40), 0, (13, 30)),  # continues after the first one's response
    ((1, 130), (12, 9), 2, (14, 12)),
    ((0, 300), (10, 40)),  # completely cached
)


def one_after_the_other() -> Plan:
    """Return a plan in which each request is sent when the previous one has ended."""

    def nth(index: int) -> PlannedRequest:
        return request(
            index, *PROMPTS[index], output=12, session="s", turn=index, **({"after": index - 1} if index else {})
        )

    return plan(*map(nth, range(len(PROMPTS))))


async def through(protocol: str) -> tuple[Measured, Measured]:
    """Run the plan twice on a fresh cluster."""
    settings = {"device": "emulated", "emulated_costs": "step=2ms,prefill_token=20us", **LONG_TIMES}
    async with process_cluster(prefill=1, decode=1, transfer="nixl", **settings) as cluster:
        url = cluster.url if protocol == "http" else cluster.grpc_address
        target = Target(urls=(url,), model=Path(cluster.settings["model"]).name, dialect="baton", protocol=protocol)
        return await measure(one_after_the_other(), target), await measure(one_after_the_other(), target)


@pytest.mark.long  # `make test` covers this by test_baton_gateway.py, with stub workers
async def test_http_and_grpc_give_the_same_tokens_and_cache_hits() -> None:
    (http, http_again), (grpc, grpc_again) = await through("http"), await through("grpc")
    for run in (http, grpc):
        assert judge_cache(run.records, one_after_the_other()).state is CacheState.COLD
        assert run.outcomes == [RequestOutcome.GOOD] * len(PROMPTS)
        ends = [(record.sent_s, record.ended_s) for record in run.records]
        assert all(ended_s <= sent_s for (_, ended_s), (sent_s, _) in pairwise(ends)), "none overlap"
        assert all(Stages.of(record.timeline).is_handed_off for record in run.records)
    for run in (http_again, grpc_again):
        assert judge_cache(run.records, one_after_the_other()).state is CacheState.WARM
    assert [record.token_ids for record in http.records] == [record.token_ids for record in grpc.records]
    cached = [record.num_cached_tokens for record in http.records]
    assert cached == [record.num_cached_tokens for record in grpc.records]
    assert cached == [0, 300 // BLOCK * BLOCK, 0, 340 // BLOCK * BLOCK, 139 // BLOCK * BLOCK, 339 // BLOCK * BLOCK]
