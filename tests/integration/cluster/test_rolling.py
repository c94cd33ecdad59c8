"""Drain of a busy decode worker, and a rolling upgrade to a release with another KV layout."""

import asyncio
import signal
from itertools import pairwise
from random import Random

import pytest

from baton.core.client_api import ClusterStatus
from baton.core.cluster.worker_report import WorkerState
from baton.core.request import Sampling
from tests.cluster import PROGRAM, ProcessCluster, process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.cluster import other_release
from tests.integration.cluster.clients import Client, Request, Response
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VOCAB_SIZE, STEP_MS = 4096, 10
EMULATED = {"device": "emulated", "emulated_costs": f"step={STEP_MS}ms,prefill_token=20us", "transfer": "local"}
DRAIN_S, STREAM_TOKENS = 1.5, 500
"""The streams of a draining worker need more than three times its drain time."""


def new_request(rng: Random, max_tokens: int) -> Request:
    prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(100))
    return Request(
        prompt=prompt,
        sampling=Sampling(max_tokens=max_tokens, temperature=1.0, seed=rng.getrandbits(31), ignore_eos=True),
    )


def check(response: Response) -> None:
    assert response.is_complete, response.failure
    sampling = response.request.sampling
    assert response.tokens[0] == emulated_answer(
        response.request.prompt, seed=sampling.seed, max_tokens=sampling.max_tokens, vocab_size=VOCAB_SIZE
    )


def decoded_by(response: Response) -> str:
    assert response.timeline is not None
    return response.timeline.legs[-1].worker_id


def runs(status: ClusterStatus, name: str) -> int:
    return sum(worker.running_seqs for worker in status.workers if worker.worker.worker_id == name)


def is_ready(status: ClusterStatus, name: str) -> bool:
    return any(w.worker.worker_id == name and w.state is WorkerState.READY for w in status.workers)


@pytest.mark.fault("F-47")
async def test_draining_decode_worker_hands_over_unfinished_requests_and_takes_no_new_ones() -> None:
    rng = Random(47)
    settings = {**EMULATED, **LONG_TIMES, "drain_s": DRAIN_S}
    async with process_cluster(prefill=1, decode=2, **settings) as cluster, Client(cluster) as client:
        await cluster.until(lambda s: sum(len(w.links) for w in s.workers) >= 2, 30, "both can pull")
        streams = [asyncio.create_task(client.send(new_request(rng, STREAM_TOKENS))) for _ in range(6)]
        await cluster.until(lambda s: runs(s, "d0") > 1 and runs(s, "d1") > 1, 30, "both decode")
        cluster.signal("d0", signal.SIGTERM)
        await cluster.until(lambda s: not is_ready(s, "d0"), 30, "it drains or has ended")
        for _ in range(6):
            late = await client.send(new_request(rng, 4))
            check(late)
            assert decoded_by(late) == "d1"
        assert await cluster.until_ended("d0") == 0
        responses = await asyncio.gather(*streams)
        for response in responses:
            check(response)
        moved = [response for response in responses if response.timeline is not None and response.timeline.attempts > 1]
        assert moved, "some streams must have been handed over"
        assert {decoded_by(response) for response in moved} == {"d1"}
        await cluster.check_clean()


@pytest.mark.long  # `make test` covers this by tests/sim/test_rolling_release.py
@pytest.mark.fault("F-50")
async def test_rolling_upgrade_to_another_kv_layout_under_load_fails_no_request() -> None:
    """One worker after the other restarts with a new layout. KV is only transferred within one release."""
    async with process_cluster(prefill=2, decode=2, drain_s=20.0, **EMULATED) as cluster:
        release = {cluster.pid(name): PROGRAM for name in cluster.roles}
        is_over = asyncio.Event()
        clients = [asyncio.create_task(keep_sending(cluster, Random(number), is_over)) for number in range(4)]
        for name in ("p0", "d0", "p1", "d1"):
            assert await cluster.stop_one(name) == 0
            await cluster.start_worker(name, program=other_release.PROGRAM)
            release[cluster.pid(name)] = other_release.PROGRAM
            await cluster.until_workers("p0", "p1", "d0", "d1")
            await asyncio.sleep(1.0)
        is_over.set()
        responses = [response for client in await asyncio.gather(*clients) for response in client]
        for response in responses:
            check(response)
        pairs = {pair for response in responses for pair in pulled_between(response, release)}
        assert pairs == {(PROGRAM, PROGRAM), (other_release.PROGRAM, other_release.PROGRAM)}
        await cluster.check_clean()


async def keep_sending(cluster: ProcessCluster, rng: Random, is_over: asyncio.Event) -> list[Response]:
    responses: list[Response] = []
    async with Client(cluster) as client:
        while not is_over.is_set():
            responses.append(await client.send(new_request(rng, 30)))
    return responses


def pulled_between(response: Response, release: dict[int, str]) -> list[tuple[str, str]]:
    """Return (owner's release, reader's release) of each transfer. A local prefill has none."""
    assert response.timeline is not None
    legs = response.timeline.legs
    return [
        (release[owner.pid], release[reader.pid])
        for owner, reader in pairwise(legs)
        if reader.kv_bytes and owner.num_computed_tokens
    ]
