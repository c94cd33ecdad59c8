"""SIGKILL or SIGSTOP of a process: every stream finishes with exact tokens while another worker lives."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import TypeAlias

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from baton.core.client_api import ClusterStatus
from baton.core.cluster.worker_report import WorkerRole
from baton.core.request import Sampling
from baton.model.loading.model_source import DEMO_DIR
from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response
from tests.integration.cluster.constrained_requests import (
    ConstrainedRequest,
    check_constrained,
    constrained_requests,
)
from tests.scale import sized

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

Streams: TypeAlias = Sequence[asyncio.Task[Response]]
ROUNDS = sized(1, 2)
STREAMS = 4
ALL = ("p0", "p1", "d0", "d1")
BACK_S = 60.0
MAX_TRIALS = 5


TIMES = {"heartbeat_s": 0.5, "detection_s": 3.0, "scheduler_wait_s": 30.0, "step_limit_s": 60.0}
"""A busy machine loses few workers with these times, and a paused one is still found soon."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["nixl", pytest.param("collective", marks=pytest.mark.long)]
)
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[ProcessCluster]:
    settings = {"transfer": request.param, "max_num_batched_tokens": 256, **TIMES}
    async with process_cluster(prefill=2, decode=2, **settings) as running:
        yield running


def new_requests(rng: Random, *, prompt_tokens: int, max_tokens: int) -> list[Request]:
    """Half of the requests are greedy, half sampled with a seed.

    They run long enough to be hit by the kill.
    """
    return [
        Request(
            prompt=tuple(rng.randrange(4, 4096) for _ in range(prompt_tokens)),
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=0.0 if i % 2 else 0.8,
                seed=rng.getrandbits(31),
                num_logprobs=5,
                ignore_eos=True,
            ),
        )
        for i in range(STREAMS)
    ]


async def kill_during(
    cluster: ProcessCluster,
    auditor: CacheAuditor,
    requests: Sequence[Request],
    victim: str,
    moment: Callable[[Streams], Awaitable[None]],
) -> list[Response]:
    """Send the requests, wait for `moment`, kill the victim and wait for all streams.

    Then check that the other workers have released everything and cache only correct blocks.
    """
    async with Client(cluster) as client:
        streams = [asyncio.create_task(client.send(request)) for request in requests]
        await moment(streams)
        await cluster.kill(victim)
        responses = list(await asyncio.gather(*streams))
        next_response = await client.send(new_requests(Random(0), prompt_tokens=20, max_tokens=4)[1])
    assert next_response.is_complete, f"the next request works: {next_response}"
    await cluster.check_clean()
    await auditor.audit(cluster)
    return responses


async def restore(cluster: ProcessCluster) -> None:
    """Restart what an earlier test killed, and wait until all pairs are connected.

    A pair that is not connected is not chosen while another one is.
    """
    missing = {*ALL, "scheduler"} - set(cluster.children)
    await asyncio.gather(
        *(cluster.start_worker(name) if name in ALL else cluster.start_service(name, name) for name in missing)
    )
    await cluster.until_workers(*ALL, limit_s=BACK_S)
    await cluster.until(all_pairs_are_warm, BACK_S, "all pairs are warm")
    await cluster.wait_ready()


def all_pairs_are_warm(status: ClusterStatus) -> bool:
    owners = [w.worker for w in status.workers if w.role is WorkerRole.PREFILL]
    readers = [w for w in status.workers if w.role is WorkerRole.DECODE]
    return all(
        any(link.peer.is_same_incarnation(owner) for link in reader.links) for reader in readers for owner in owners
    )


def check(checker: ExactnessChecker, responses: list[Response]) -> None:
    assert [response.failure for response in responses if response.failure] == []
    assert all(response.is_complete for response in responses)
    checker.check([answer for response in responses for answer in response.answers()])


async def until_resumed(fault: Callable[[], Awaitable[list[Response]]]) -> None:
    """Repeat a fault until it hit a stream. On a busy machine all streams may have ended before it."""
    for _ in range(MAX_TRIALS):
        responses = await fault()
        if max(response.timeline.attempts for response in responses if response.timeline) > 1:
            return
    raise AssertionError("the fault must have hit a stream")


async def until_busy(cluster: ProcessCluster, victim: str, streams: Streams, *, waiting: bool = False) -> None:
    """Wait until the victim reports running sequences (waiting ones with `waiting`), or no stream is left."""
    await cluster.until(
        lambda s: (
            any(w.worker.worker_id == victim and (w.waiting_seqs if waiting else w.running_seqs) for w in s.workers)
            or all(stream.done() for stream in streams)
        ),
        BACK_S,
        f"{victim} has work",
    )


async def kill_until_resumed(
    cluster: ProcessCluster,
    checker: ExactnessChecker,
    auditor: CacheAuditor,
    rng: Random,
    victims: tuple[str, str],
    *,
    prompt_tokens: int,
    max_tokens: int,
    waiting: bool = False,
    at_most_later_s: float = 0.0,
) -> None:
    """Kill one of the victims while it has work, until a stream was resumed. Check all answers each time.

    `waiting`: as in `until_busy`. The kill comes up to `at_most_later_s` later.
    """

    async def kill() -> list[Response]:
        await restore(cluster)
        victim = rng.choice(victims)
        requests = new_requests(rng, prompt_tokens=prompt_tokens, max_tokens=max_tokens)

        async def moment(streams: Streams) -> None:
            await until_busy(cluster, victim, streams, waiting=waiting)
            await asyncio.sleep(rng.uniform(0.0, at_most_later_s))

        responses = await kill_during(cluster, auditor, requests, victim, moment)
        check(checker, responses)
        return responses

    await until_resumed(kill)


@pytest.mark.fault("F-1")
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_prefill_worker_crash_during_prefill_resumes_all_streams(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    rng, size = Random(100 + number), sized(900, 3000)
    await kill_until_resumed(
        cluster, checker, auditor, rng, ("p0", "p1"), prompt_tokens=size, max_tokens=8, at_most_later_s=0.2
    )


@pytest.mark.fault("F-4", "F-40")
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_decode_worker_crash_resumes_without_duplicate_tokens(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    rng = Random(200 + number)
    await kill_until_resumed(
        cluster, checker, auditor, rng, ("d0", "d1"), prompt_tokens=100, max_tokens=240, at_most_later_s=0.3
    )


@pytest.mark.long  # `make test` covers this by tests/sim/test_constrained.py and test_constrained_exactness.py
@pytest.mark.fault("F-4")
@pytest.mark.parametrize("num_tokens", [1, 3, 7])
async def test_constrained_samples_equal_the_reference_after_a_kill_of_their_decode_worker(
    cluster: ProcessCluster, auditor: CacheAuditor, num_tokens: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval()

    for request in constrained_requests(num_tokens):
        victims = iter(("d0", "d1", "d0", "d1", "d0"))

        async def kill(request: ConstrainedRequest = request, victims: Iterator[str] = victims) -> list[Response]:
            await restore(cluster)
            begun = len(cluster.history)

            async def first_tokens(streams: Streams) -> None:
                while not all(stream.done() for stream in streams):
                    answers = [answer for answer in cluster.history[begun:] if isinstance(answer, Response)]
                    if answers and len(answers[0].tokens.get(0, ())) >= num_tokens:
                        return
                    await asyncio.sleep(0)

            responses = await kill_during(cluster, auditor, [request], next(victims), first_tokens)
            check_constrained(model, responses)
            return responses

        await until_resumed(kill)


@pytest.mark.long  # `make test` pauses workers in test_relay_faults.py, test_storm.py and test_nemesis.py
@pytest.mark.fault("F-7")
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_paused_decode_worker_loses_its_requests_and_its_late_tokens_are_dropped(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    rng = Random(250 + number)

    async def pause() -> list[Response]:
        await restore(cluster)
        victim, other = rng.sample(["d0", "d1"], 2)
        requests = new_requests(rng, prompt_tokens=100, max_tokens=240)
        async with Client(cluster) as client:
            streams = [asyncio.create_task(client.send(request)) for request in requests]
            await until_busy(cluster, victim, streams)
            cluster.signal(victim, signal.SIGSTOP)
            await cluster.until(
                lambda s: (
                    other in {w.worker.worker_id for w in s.workers if w.running_seqs >= STREAMS}
                    or all(stream.done() for stream in streams)
                ),
                BACK_S,
                f"the requests run on {other}",
            )
            cluster.signal(victim, signal.SIGCONT)
            responses = list(await asyncio.gather(*streams))
        check(checker, responses)
        return responses

    await until_resumed(pause)
    await cluster.until_workers(*ALL, limit_s=BACK_S)
    await cluster.check_clean()
    await auditor.audit(cluster)


@pytest.mark.long  # `make test` covers this by tests/sim/test_storm.py, which kills decode workers at any moment
@pytest.mark.fault("F-5")
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_decode_worker_crash_while_it_waits_for_kv_resumes_all_streams(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    # They wait for KV for as long as their prefill takes.
    await kill_until_resumed(
        cluster,
        checker,
        auditor,
        Random(300 + number),
        ("d0", "d1"),
        prompt_tokens=2500,
        max_tokens=8,
        waiting=True,
    )


@pytest.mark.long  # `make test` covers this by test_scheduler_restart_under_load_places_no_request_twice
@pytest.mark.fault("F-31")
@pytest.mark.parametrize("number", range(ROUNDS))
async def test_scheduler_crash_under_load_loses_no_request(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    await restore(cluster)
    rng = Random(400 + number)
    requests = new_requests(rng, prompt_tokens=200, max_tokens=100)
    async with Client(cluster) as client:
        streams = [asyncio.create_task(client.send(request)) for request in requests]
        await asyncio.sleep(rng.uniform(0.1, 0.6))
        assert not all(stream.done() for stream in streams), "the kill must have hit a stream"
        await cluster.kill("scheduler")
        late = asyncio.create_task(client.send(new_requests(rng, prompt_tokens=30, max_tokens=4)[0]))
        await cluster.start_service("scheduler", "scheduler")
        responses = [*await asyncio.gather(*streams), await late]
    check(checker, responses)
    await cluster.until_workers(*ALL)
    await cluster.check_clean()
    await auditor.audit(cluster)


@pytest.mark.long  # `make test` covers this by tests/sim/test_lost_role.py
@pytest.mark.fault("F-9")
async def test_request_without_any_decode_worker_fails_with_no_workers(cluster: ProcessCluster) -> None:
    await restore(cluster)
    for victim in ("d0", "d1"):
        await cluster.kill(victim)
    await cluster.until_workers("p0", "p1", limit_s=BACK_S)
    async with Client(cluster) as client:
        response = await client.send(new_requests(Random(5), prompt_tokens=20, max_tokens=4)[0], deadline_s=10)
        assert response.failure == "no_workers"
        for victim in ("d0", "d1"):
            await cluster.start_worker(victim)
        await cluster.until_workers(*ALL, limit_s=BACK_S)
        await cluster.wait_ready()
        assert (await client.send(new_requests(Random(6), prompt_tokens=20, max_tokens=4)[0])).is_complete


@pytest.mark.long  # `make test` covers this by tests/sim/test_lost_role.py
@pytest.mark.fault("F-9")
async def test_decode_workers_prefill_locally_without_any_prefill_worker(
    cluster: ProcessCluster, checker: ExactnessChecker
) -> None:
    """Must run last: the prefill workers stay dead. That killed ones come back is part of the tests above."""
    await restore(cluster)
    for victim in ("p0", "p1"):
        await cluster.kill(victim)
    await cluster.until_workers("d0", "d1", limit_s=BACK_S)
    async with Client(cluster) as client:
        responses = [await client.send(request) for request in new_requests(Random(7), prompt_tokens=60, max_tokens=6)]
    check(checker, responses)
    assert not any(leg.kv_bytes for response in responses if response.timeline for leg in response.timeline.legs)
