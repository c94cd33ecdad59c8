"""Ray's node process dies while its worker decodes: streams go on elsewhere, and the worker comes back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random
from typing import Any

import httpx
import pytest

from tests.emulated_answer import emulated_answer
from tests.integration.fleet.ray_hosts import ray_hosts
from tests.integration.fleet.test_many_nodes import VOCAB_SIZE, Cluster
from tests.netns import unavailable_reason

UNAVAILABLE_REASON = unavailable_reason()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(UNAVAILABLE_REASON), reason=UNAVAILABLE_REASON or "network namespaces are available"),
]

NUM_STREAMS, NUM_TOKENS = 6, 600
BACK_S = 120.0
DECODE_PLACE = ("--num-cpus", "1", "--resources", '{"baton_decode": 1}')


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A prefill node, and two decode nodes with one worker each."""
    with ray_hosts() as hosts, ExitStack() as stack:
        hosts.join(hosts.add("node-p"), "--num-cpus", "1", "--resources", '{"baton_prefill": 1}')
        for name in ("node-d", "node-e"):
            hosts.join(hosts.add(name), *DECODE_PLACE)
        for host in hosts.hosts:
            host.until_node()
        yield Cluster(hosts, stack, decode=2, emulated_costs="step=10ms,prefill_token=20us", scheduler_wait_s=30.0)


def answer_exactly(url: str, number: int) -> dict[str, Any]:
    """Send a request that decodes for several seconds, and check every token. Return its timeline."""
    rng = Random(number)
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(100)]
    request = {"prompt": prompt, "max_tokens": NUM_TOKENS, "seed": number, "temperature": 1.0, "ignore_eos": True}
    body = {"model": "demo", "return_token_ids": True, "timeline": True, **request}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120.0)
    assert response.status_code == httpx.codes.OK, response.text
    right = emulated_answer(prompt, seed=number, max_tokens=NUM_TOKENS, vocab_size=VOCAB_SIZE)
    assert response.json()["choices"][0]["token_ids"] == right
    timeline: dict[str, Any] = response.json()["baton"]
    return timeline


@pytest.mark.fault("F-14")
def test_streams_of_a_lost_ray_node_resume_elsewhere_and_its_worker_comes_back(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.workers().keys() == {"prefill-0", "decode-0", "decode-1"}, "all workers serve")
    cluster.until_ready()
    before = cluster.workers()
    lost = next(host for host in cluster.hosts.hosts if host.name == before["decode-0"]["host"])
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [
            threads.submit(cluster.head.call, lambda number=number: answer_exactly(cluster.url, number))
            for number in range(NUM_STREAMS)
        ]
        cluster.until(lambda: cluster.workers()["decode-0"]["running_seqs"] > 0, "the lost node has work")
        lost.kill_raylet()
        timelines = [stream.result(180.0) for stream in streams]
    assert max(timeline["attempts"] for timeline in timelines) > 1, "the fault must have hit a stream"
    cluster.until(lambda: cluster.workers().keys() == {"prefill-0", "decode-1"}, "the lost worker is not listed")
    cluster.head.call(lambda: answer_exactly(cluster.url, 100))
    cluster.hosts.join(lost, *DECODE_PLACE)
    back = cluster.until(lambda: cluster.workers().get("decode-0"), "the worker is back", limit_s=BACK_S)
    assert (back["host"], back["worker"] == before["decode-0"]["worker"]) == (lost.name, False), "a new incarnation"
    cluster.head.call(lambda: answer_exactly(cluster.url, 101))
