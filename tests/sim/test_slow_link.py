"""The KV of a pair whose link is too slow is computed by the decode worker itself. All services are the real
ones."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.sim import virtual_time
from baton.sim.sim_cluster import SimCluster, SimModel
from baton.sim.sim_transfer_backend import LinkModel
from tests.sim.one_request import PROMPT_TOKENS, Answer, ask
from tests.sim.storm_cluster import config

pytestmark = pytest.mark.sim

SLOW, FAST = SimModel(link=LinkModel(bytes_per_s=1e4)), SimModel(link=LinkModel(bytes_per_s=1e10))


def answers(model: SimModel, **settings: Any) -> list[Answer]:
    """Answers to requests that are sent one after the other to one prefill and one decode worker."""

    async def main() -> list[Answer]:
        cluster = SimCluster(replace(config("kv_centric"), prefill=1, decode=1, **settings), model, seed=17)
        await cluster.start()
        await asyncio.sleep(10.0)
        answered = [await ask(cluster, number) for number in range(20)]
        await cluster.aclose()
        return answered

    return virtual_time.run(main())


@pytest.mark.fault("F-17")
@pytest.mark.parametrize(
    ("model", "settings"),
    [(FAST, {"min_link_gbps": 1000.0}), (SLOW, {})],
    ids=["slower_than_required", "predicted_too_slow"],
)
def test_decode_worker_computes_the_prompt_itself_if_the_link_is_too_slow(
    model: SimModel, settings: dict[str, Any]
) -> None:
    slow, fast = answers(model, **settings), answers(FAST)
    assert [answer.token_ids for answer in slow] == [answer.token_ids for answer in fast]
    for answer in slow:
        (leg,) = answer.known_timeline.legs
        assert (leg.worker_id, leg.kv_bytes, len(answer.token_ids)) == ("decode-0", 0, 8)
        assert leg.num_computed_tokens + leg.num_cached_tokens == PROMPT_TOKENS
    assert any(answer.pulled_bytes for answer in fast)
