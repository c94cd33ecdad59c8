"""Placement in a cluster of real processes with emulated workers.

Shared prefixes are computed once, and every answer is exact under faults of Redis, schedulers and prefix
owners. The tokens of an emulated worker follow from the content of the whole context in its KV memory, so a
wrong block gives a wrong answer.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import copy
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import redis as sync_redis

from baton.core.client_api import WorkerStatus
from baton.core.errors import StoreUnavailable
from baton.core.kv.block_hash import BlockHash, chain, root_hash, token_ids
from baton.core.kv.kv_events import KvEvent, KvEventKind
from baton.core.request import Sampling
from baton.engine.executors.emulated_model import EmulatedModel, read_emulated_model
from baton.fleet.processes.supervisor import Child
from baton.model.loading.model_source import DEMO_DIR
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys
from baton.store.redis.redis_kv_event_feed import RedisKvEventFeed
from tests.cluster import ProcessCluster, process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.cluster.clients import Client, Request, Response
from tests.redis_proxy import RedisProxy
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

WORKERS = ("p0", "p1", "d0", "d1")
MAX_MODEL_LEN = 6144
BLOCK_SIZE_TOKENS = 16
PREFIX_TOKENS = 4096
INDEX_RECOVERY_S = 30.0
CLAIMS, MAX_CLAIMS = 5, 30
MAX_TRIALS = 5
MIN_TRAFFIC = 4
TRAFFIC_TOKENS = 100
"""Number of tokens of a background prompt that no other prompt shares."""
BOUND_S = 20.0
"""A generous limit for what takes well under a second on an idle machine."""


TIMES = {**LONG_TIMES, "heartbeat_s": 1.0, "detection_s": 6.0, "transfer_deadline_min_s": 5.0}
"""Long, so that a busy machine causes no retries: these tests count attempts and computed tokens."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    """A cluster in which 4k tokens take about half a second to compute."""
    settings = {
        "device": "emulated",
        "emulated_costs": "step=5ms,prefill_token=100us,decode_seq=100us",
        "policy": "kv_centric",
        "kv_announce_every": 1,  # so that the index has as many blocks as the workers
        "transfer": "nixl",
        "kv_memory": 256 * 2**20,
        "max_model_len": MAX_MODEL_LEN,
        "admin_port": 0,
        **TIMES,
    }
    async with process_cluster(prefill=2, decode=2, redis_proxy=RedisProxy(), **settings) as running:
        await running.until(lambda s: sum(len(w.links) for w in s.workers) >= 4, 30, "all pairs are warm")
        yield running


MODEL: EmulatedModel = read_emulated_model(DEMO_DIR, dtype="float32", max_model_len=MAX_MODEL_LEN)


def prompt(rng: Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 4096) for _ in range(num_tokens))


def new_request(tokens: tuple[int, ...], max_tokens: int = 4) -> Request:
    return Request(prompt=tokens, sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def expected_answer(request: Request) -> list[int]:
    """Compute the expected answer without any cluster."""
    max_tokens = request.sampling.max_tokens
    return emulated_answer(request.prompt, seed=0, max_tokens=max_tokens, vocab_size=MODEL.vocab_size)


def check(responses: list[Response]) -> None:
    assert [response.failure for response in responses if response.failure] == []
    assert all(response.is_complete for response in responses)
    assert [response.tokens[0] for response in responses] == [
        expected_answer(response.request) for response in responses
    ]


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


def logged(cluster: ProcessCluster, name: str, event: str) -> list[dict[str, Any]]:
    """Return all log entries of an event, of all incarnations of a process."""
    return [entry for entry in cluster.log_entries(name) if entry["event"] == event]


async def computed_tokens(cluster: ProcessCluster) -> float:
    return sum([await cluster.metric(name, "baton_step_tokens_total") for name in WORKERS])


async def failed_pulls(cluster: ProcessCluster, name: str) -> float:
    """Return the number of KV pulls of a worker that did not complete."""
    samples = await cluster.scrape(name)
    pulls = [sample for sample in samples if sample.name == "baton_transfers_total"]
    return sum(sample.value for sample in pulls if sample.labels["outcome"] != "received")


def accounted_tokens(responses: list[Response]) -> int:
    """Return the tokens that these answers required: uncached prompt tokens, and all output tokens but the
    first."""
    assert all(response.usage is not None for response in responses)
    return sum(
        u.num_prompt_tokens - u.num_cached_tokens + u.num_output_tokens - 1
        for response in responses
        if (u := response.usage) is not None
    )


@asynccontextmanager
async def traffic(
    cluster: ProcessCluster, rng: Random, *, max_tokens: int = 8, apart_s: float = 0.1
) -> AsyncIterator[list[Response]]:
    """Send a request every `apart_s` during the block, half of them with a shared prefix.

    At least `MIN_TRAFFIC` are sent. All answers must be exact and start within `BOUND_S`. The yielded list is
    filled after the block.
    """
    shared, tasks, responses = prompt(rng, 320), [], []
    async with Client(cluster) as client:

        async def keep_sending() -> None:
            while True:
                tokens = (shared if len(tasks) % 2 else ()) + prompt(rng, TRAFFIC_TOKENS)
                tasks.append(asyncio.create_task(client.send(new_request(tokens, max_tokens))))
                await asyncio.sleep(apart_s)

        sending = asyncio.create_task(keep_sending())
        try:
            yield responses
            while len(tasks) < MIN_TRAFFIC:  # noqa: ASYNC110 - the block may be over at once
                await asyncio.sleep(apart_s)
        finally:
            sending.cancel()
            responses += await asyncio.gather(*tasks)
    check(responses)
    assert max(response.timeline.ttft_s or 0.0 for response in responses if response.timeline) < BOUND_S


async def test_burst_on_a_new_prefix_computes_it_at_most_twice(cluster: ProcessCluster) -> None:
    rng = Random(1)
    shared = prompt(rng, PREFIX_TOKENS)
    requests = [new_request((*shared, *prompt(rng, 16))) for _ in range(50)]
    before = await computed_tokens(cluster)
    async with Client(cluster) as client:
        responses = list(await asyncio.gather(*(client.send(request) for request in requests)))
    check(responses)
    own = sum(len(request.prompt) - PREFIX_TOKENS + request.sampling.max_tokens - 1 for request in requests)
    # On a stalled machine the deadline of a pull can pass. Its decode worker computes the missing blocks itself.
    failed = sum([await failed_pulls(cluster, name) for name in WORKERS])
    again = failed * len(requests[0].prompt)
    assert accounted_tokens(responses) - own <= 2 * PREFIX_TOKENS + again
    assert await computed_tokens(cluster) - before - own <= 2 * PREFIX_TOKENS + again, f"{failed} failed pulls"
    await cluster.check_clean()


async def until_index_is_complete(cluster: ProcessCluster, within_s: float) -> None:
    """Wait until the scheduler's index has as many blocks as the idle workers cache, and follows all
    workers."""

    async def is_complete() -> bool:
        cached = sum(w.blocks.cached for w in (await cluster.status()).workers)
        claims = await cluster.metric("scheduler", "baton_prefix_index_blocks")
        return claims == cached and not await cluster.metric("scheduler", "baton_prefix_index_workers_behind")

    await until(is_complete, within_s)


async def killed(cluster: ProcessCluster) -> None:
    """Kill Redis, keep it down for two heartbeats, and restart it empty."""
    spec = cluster.children["redis"].spec
    await cluster.kill("redis")
    await asyncio.sleep(2.0)
    cluster.children["redis"] = Child(spec)
    await cluster.children["redis"].start()


async def stopped(cluster: ProcessCluster) -> None:
    cluster.signal("redis", signal.SIGSTOP)
    await asyncio.sleep(2.0)
    cluster.signal("redis", signal.SIGCONT)


async def slow(cluster: ProcessCluster) -> None:
    assert cluster.redis_proxy is not None
    cluster.redis_proxy.delay_s = 1.0
    await asyncio.sleep(4.0)
    cluster.redis_proxy.delay_s = 0.0


async def flushed(cluster: ProcessCluster) -> None:
    with sync_redis.Redis.from_url(cluster.settings["redis_url"]) as client:
        await asyncio.to_thread(client.flushall)  # the proxy needs this loop


@pytest.mark.fault("F-27", "F-28", "F-29")
@pytest.mark.parametrize(
    "fault",
    [killed, pytest.param(stopped, marks=pytest.mark.long), pytest.param(slow, marks=pytest.mark.long), flushed],
    ids=lambda fault: fault.__name__,
)
async def test_redis_fault_under_load_fails_no_request(
    cluster: ProcessCluster, fault: Callable[[ProcessCluster], Awaitable[None]]
) -> None:
    """Prefixes computed during the fault are found in the index later."""
    rng = Random(fault.__name__)
    meanwhile = prompt(rng, 640)
    async with traffic(cluster, rng), Client(cluster) as client:
        await asyncio.sleep(0.3)
        failing = asyncio.create_task(fault(cluster))
        await asyncio.sleep(0.3)
        check([await client.send(new_request(meanwhile, 1))])
        await failing
    await until_index_is_complete(cluster, INDEX_RECOVERY_S)
    async with Client(cluster) as client:
        next_response = await client.send(new_request((*meanwhile, *prompt(rng, 20))))
    check([next_response])
    assert next_response.usage is not None
    assert next_response.usage.num_cached_tokens >= len(meanwhile)


def hashes_of(tokens: tuple[int, ...]) -> tuple[BlockHash, ...]:
    root = root_hash(model_fingerprint=MODEL.model_fingerprint, block_size_tokens=BLOCK_SIZE_TOKENS)
    return tuple(chain(root, token_ids(tokens), BLOCK_SIZE_TOKENS))


async def claim(cluster: ProcessCluster, worker: WorkerStatus, hashes: tuple[BlockHash, ...]) -> None:
    """Publish to Redis, in the name of a worker, that it holds these blocks."""
    connection = RedisConnection(cluster.settings["redis_url"])
    try:
        feed = RedisKvEventFeed(connection, Keys())

        async def is_published() -> bool:
            """Return False if the store has just lost all data, or if the worker took the next number."""
            last = await feed.renew(worker.worker, 10.0)
            if last <= 0:
                return False
            event = KvEvent(
                worker=worker.worker,
                event_seq=last + 1,
                kind=KvEventKind.STORED,
                hashes=hashes,
                block_size_tokens=BLOCK_SIZE_TOKENS,
            )
            try:
                await feed.publish(worker.worker, [event], 10.0)
            except StoreUnavailable:
                return False
            return True

        await until(is_published, BOUND_S)
    finally:
        await connection.aclose()


@pytest.mark.fault("F-30")
async def test_false_claim_in_the_index_costs_only_time(cluster: ProcessCluster) -> None:
    """The claim attracts a request, which is then computed, and the claim disappears.

    The worker may correct a claim before the request arrives, so the test makes several.
    """
    rng = Random(30)
    victim = next(w for w in (await cluster.status()).workers if w.worker.worker_id == "p1")
    num_believed = 0
    async with Client(cluster) as client:
        for number in range(MAX_CLAIMS):
            claimed = prompt(rng, 1024)
            await claim(cluster, victim, hashes_of(claimed))
            await asyncio.sleep(0.05)
            response = await client.send(new_request((*claimed, *prompt(rng, 20))))
            check([response])
            assert response.usage is not None
            assert response.usage.num_cached_tokens == 0, "no worker held the prefix"
            num_believed += await claimed_blocks(cluster, response) == len(claimed) // BLOCK_SIZE_TOKENS
            if num_believed and number + 1 >= CLAIMS:
                break
    assert num_believed > 0
    await until_index_is_complete(cluster, BOUND_S)
    await cluster.check_clean()


async def claimed_blocks(cluster: ProcessCluster, response: Response) -> int:
    """Return the blocks of the prompt that its first placement expected to reuse or to pull."""
    assert response.timeline is not None
    async with open_channel(cluster.grpc_address, channel_options(10.0)) as channel:
        admin = AdminClient(channel, cluster.grpc_address, call_s=60.0)
        placed = (await admin.explain(response.timeline.request_id))[0].placement
    assert placed is not None
    return max(placed.prefill_overlap_blocks, placed.prefix_source.num_blocks if placed.prefix_source else 0)


@pytest.mark.fault("F-32")
async def test_second_scheduler_can_start_under_load(cluster: ProcessCluster) -> None:
    """Both schedulers place requests, one per gateway. No request is lost and no prompt is computed twice."""
    before = await computed_tokens(cluster)
    async with traffic(cluster, Random(32)) as responses:
        await cluster.start_service("scheduler2", "scheduler")
        address = cluster.children["scheduler2"].address
        await cluster.start_service("gateway2", "gateway", http_port=0, grpc_port=0, schedulers=[address])
        other = copy(cluster)
        other.grpc_address = logged(cluster, "gateway2", "grpc_started")[-1]["address"]
        async with traffic(other, Random(33)) as more:
            await asyncio.sleep(1.5)
    for name in ("scheduler", "scheduler2"):
        assert await cluster.metric(name, "baton_decisions_total") >= len(more)
    assert await computed_tokens(cluster) - before - accounted_tokens([*responses, *more]) < TRAFFIC_TOKENS, (
        "no prompt was computed twice"
    )
    for name in ("gateway2", "scheduler2"):
        await cluster.stop_one(name)
    await cluster.check_clean()


@pytest.mark.fault("F-31")
async def test_scheduler_restart_under_load_places_no_request_twice(cluster: ProcessCluster) -> None:
    """Running streams are not affected, and new requests wait for the scheduler."""
    rng = Random(31)
    before = await computed_tokens(cluster)
    async with Client(cluster) as client:
        streams = [asyncio.create_task(client.send(new_request(prompt(rng, 200), 1000))) for _ in range(6)]
        await asyncio.sleep(0.3)
        async with traffic(cluster, rng) as responses:
            await asyncio.sleep(0.3)
            await cluster.kill("scheduler")
            assert not any(stream.done() for stream in streams), "streams must continue without a scheduler"
            await asyncio.sleep(0.5)
            await cluster.start_service("scheduler", "scheduler")
            await asyncio.sleep(0.5)
        through = list(await asyncio.gather(*streams))
    check(through)
    assert {response.timeline.attempts for response in (*through, *responses) if response.timeline} == {1}
    assert await computed_tokens(cluster) - before - accounted_tokens([*through, *responses]) < TRAFFIC_TOKENS, (
        "no prompt was computed twice"
    )
    await cluster.until_workers(*WORKERS)
    await cluster.check_clean()


@pytest.mark.long  # `make test` covers this by test_transfer_between_processes.py and tests/sim/test_storm.py
@pytest.mark.fault("F-2")
async def test_prefix_owner_crash_during_a_pull_is_compensated_by_the_reader(cluster: ProcessCluster) -> None:
    """The owner of a prefix is busy, so another worker pulls the prefix and is paused after the second slice.

    Then the owner is killed. The reader computes the missing part, and the owner's request continues
    elsewhere.
    """
    rng = Random(5)
    pair = {"p0": "p1", "p1": "p0"}
    await asyncio.gather(*(cluster.stop_one(name) for name in pair))
    await asyncio.gather(
        *(
            cluster.start_worker(name, failpoints=f"transfer.slice_done[owner={other}]=sleep:0.6@2")
            for name, other in pair.items()
        )
    )
    await cluster.until_workers(*WORKERS)
    async with Client(cluster) as client:
        for _ in range(MAX_TRIALS):  # the owner may have no work any more, and serve the prefix itself
            held = prompt(rng, PREFIX_TOKENS)
            first = await client.send(new_request(held, 1))
            assert first.timeline is not None
            (holder,) = (leg.worker_id for leg in first.timeline.legs)
            reader = pair[holder]
            await until_index_is_complete(cluster, BOUND_S)
            busy = asyncio.create_task(client.send(new_request((*held, *prompt(rng, 2000)), 1)))
            await asyncio.sleep(0.02)
            pulls = asyncio.create_task(client.send(new_request((*held, *prompt(rng, 20)), 1)))
            if await is_paused(cluster, reader, pulls):
                break
            check([first, await pulls, await busy])
        else:
            pytest.fail("no worker pulled the prefix from a busy owner")
        await cluster.kill(holder)
        responses = [first, await pulls, await busy]
    check(responses)
    assert responses[1].timeline is not None
    assert [leg.worker_id for leg in responses[1].timeline.legs] == [reader]
    await cluster.start_worker(holder)
    await cluster.until_workers(*WORKERS)
    await cluster.check_clean()


async def is_paused(cluster: ProcessCluster, reader: str, pulls: asyncio.Task[Response]) -> bool:
    """Wait until the reader is paused, and return True, or until its request has ended without a pause."""
    while not pulls.done():
        if logged(cluster, reader, "failpoint_fired"):
            return True
        await asyncio.sleep(0.02)
    return bool(logged(cluster, reader, "failpoint_fired"))
