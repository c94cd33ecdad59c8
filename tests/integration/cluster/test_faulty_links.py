"""A cluster on a network that loses, delays, duplicates and reorders packets, or has slow or cut data paths.

The tokens of an emulated worker follow from the content of its KV memory, so wrong KV gives wrong tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from baton.core.client_api import ClusterStatus
from baton.core.cluster.worker_report import LinkReport
from baton.core.request import Sampling
from tests.cluster import ProcessCluster, process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.cluster.clients import Client, Request, Response
from tests.integration.cluster.faulty_links import KV_PORTS, FaultyLinks
from tests.integration.transfer.faulty_network import Faults, FaultyNetwork, faulty_network_unavailable_reason

SKIP_REASON = faulty_network_unavailable_reason()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(SKIP_REASON), reason=SKIP_REASON or "namespaces and TUN devices are available"),
]
VOCAB_SIZE, NUM_TOKENS, PROMPT_TOKENS = 4096, 20, 200
UNRELIABLE = Faults(loss_share=0.01, duplicate_share=0.03, reorder_share=0.03, delay_s=(0.0002, 0.002))
LONG_LIMITS: dict[str, Any] = {
    "heartbeat_s": 2.0,
    "detection_s": 20.0,
    "lease_s": 30.0,
    "kv_claim_timeout_s": 30.0,
    "transfer_deadline_min_s": 10.0,
    "transfer_deadline_max_s": 40.0,
    "pull_wait_s": 30.0,
}
"""Timeouts with which slow packets are not taken for lost processes. They are about the defaults."""
LIMIT_S = 90.0


@asynccontextmanager
async def cluster_of(*workers: str, seed: int, **settings: Any) -> AsyncIterator[tuple[ProcessCluster, FaultyLinks]]:
    """Run a cluster of these emulated workers, each process on its own machine."""
    with FaultyNetwork(seed) as network:
        links = FaultyLinks(network, "redis", "scheduler", "gateway", *workers)
        numbers = {role: sum(name[0] == role[0] for name in workers) for role in ("prefill", "decode", "hybrid")}
        emulated = {"device": "emulated", "emulated_costs": "step=4ms,prefill_token=20us"}
        async with process_cluster(network=links, **numbers, **{**emulated, **settings}) as cluster:
            await cluster.until_workers(*workers)
            yield cluster, links


def new_request(number: int) -> Request:
    rng = Random(number)
    prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(PROMPT_TOKENS))
    return Request(prompt=prompt, sampling=Sampling(max_tokens=NUM_TOKENS, temperature=1.0, seed=number))


def check(response: Response) -> None:
    """Check that the answer is complete and exact."""
    assert response.is_complete, response.failure
    sampling = response.request.sampling
    assert sampling.seed is not None
    right = emulated_answer(
        response.request.prompt, seed=sampling.seed, max_tokens=sampling.max_tokens, vocab_size=VOCAB_SIZE
    )
    assert response.tokens[0] == right


def pulled_from(response: Response) -> str:
    """Return the prefill worker whose KV was read; empty if none was."""
    assert response.timeline is not None
    legs = response.timeline.legs
    return legs[0].worker_id if len(legs) == 2 and legs[1].kv_bytes else ""


def link_of(status: ClusterStatus, reader: str, owner: str) -> LinkReport | None:
    """Return the link over which one worker reads from another, as the status shows it."""
    (worker,) = [worker for worker in status.workers if worker.worker.worker_id == reader]
    return next((link for link in worker.links if link.peer.worker_id == owner), None)


async def until_link(cluster: ProcessCluster, owner: str, *, broken: bool) -> LinkReport:
    """Wait until the link from d0 to a prefill worker was measured, and is broken or not."""

    def has_changed(status: ClusterStatus) -> bool:
        link = link_of(status, "d0", owner)
        return link is not None and link.broken == broken and link.bytes_per_s > 0

    link = link_of(await cluster.until(has_changed, LIMIT_S, f"link to {owner}: broken={broken}"), "d0", owner)
    assert link is not None
    return link


@pytest.mark.fault("F-16")
async def test_unreliable_packets_cause_no_error_and_exact_answers() -> None:
    async with cluster_of("p0", "d0", seed=16, **LONG_LIMITS) as (cluster, links):
        links.network.faults = UNRELIABLE
        async with Client(cluster) as client:
            responses = await asyncio.gather(*(client.send(new_request(number)) for number in range(8)))
        for response in responses:
            check(response)
            assert response.timeline is not None
            assert response.timeline.attempts == 1
        links.network.faults = Faults()  # the polls below give up after two seconds
        assert any(pulled_from(response) for response in responses)
        await cluster.check_clean(limit_s=LIMIT_S)
        cluster.check_alive()
        counts = links.network.counts
        assert min(counts.lost, counts.duplicated, counts.reordered) >= 10, counts


@pytest.mark.fault("F-15")
async def test_cut_data_path_is_avoided_and_used_again_after_healing() -> None:
    """The control path works, so both workers count as alive. Other requests use the other pair."""
    async with cluster_of("p0", "p1", "d0", seed=15) as (cluster, links), Client(cluster) as client:
        for owner in ("p0", "p1"):
            await until_link(cluster, owner, broken=False)
        links.set_data_path("p0", "d0", Faults(loss_share=1.0, ports=KV_PORTS))
        during = [await client.send(new_request(number)) for number in range(6)]
        for response in during:
            check(response)
            assert pulled_from(response) != "p0"
        link = await until_link(cluster, "p0", broken=True)
        assert link.problem == "transfer_timeout"
        links.set_data_path("p0", "d0", None)
        await until_link(cluster, "p0", broken=False)
        await cluster.check_clean(limit_s=LIMIT_S)
        for number in range(100, 140):
            response = await client.send(new_request(number))
            check(response)
            if pulled_from(response) == "p0":
                break
        else:
            pytest.fail("the healed pair was never used")
        cluster.check_alive()


@pytest.mark.fault("F-17")
async def test_data_path_slower_than_required_is_refused_before_it_is_used() -> None:
    settings = {"min_link_gbps": 0.05, "transfer_deadline_max_s": 20.0, "transfer_deadline_min_s": 20.0}
    with FaultyNetwork(17) as network:
        links = FaultyLinks(network, "redis", "scheduler", "gateway", "p0", "p1", "d0")
        links.set_data_path("p0", "d0", Faults(bytes_per_s=1e6, ports=KV_PORTS))
        emulated = {"device": "emulated", "emulated_costs": "step=4ms,prefill_token=20us"}
        async with (
            process_cluster(network=links, prefill=2, decode=1, **{**emulated, **settings}) as cluster,
            Client(cluster) as client,
        ):
            await cluster.until_workers("p0", "p1", "d0")
            link = await until_link(cluster, "p0", broken=True)
            assert link.problem.startswith("refused: measured 0.0")
            responses = [await client.send(new_request(number)) for number in range(4)]
            for response in responses:
                check(response)
                assert pulled_from(response) != "p0"
            assert await cluster.metric("d0", "baton_refused_links") == 1
            await cluster.check_clean(limit_s=LIMIT_S)
            cluster.check_alive()
