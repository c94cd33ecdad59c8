"""Faults that need real processes: restarts, failing sequences, layout mismatches, full memory, cancels,
deadlines and drains."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from baton.core.client_api import ClusterStatus
from baton.core.request import Sampling
from baton.model.loading.random_init import init_model
from tests.cache_audit import CacheAuditor
from tests.cluster import DEMO_BLOCK_BYTES, ProcessCluster, process_cluster
from tests.cluster_network import HOST
from tests.emulated_answer import emulated_answer
from tests.exactness import ExactnessChecker
from tests.free_port import free_port
from tests.integration.cluster.clients import Client, Request, Response, random_requests, send_all
from tests.integration.test_model_exactness import TINY_MODELS
from tests.scale import sized
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

MARKER = 4000
"""A token that no other prompt of these tests contains. Failpoints fire on it."""
MAX_TRIALS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    """One prefill and one decode worker. On a marker token, a sequence raises or its logits become NaN."""
    failpoints = f"sequence_step[token={MARKER}]=raise:marked; logits[token={MARKER + 1}]=raise:nan"
    async with process_cluster(prefill=0, decode=0, wait=False, **LONG_TIMES) as running:
        await asyncio.gather(
            running.start_worker("p0", failpoints=failpoints, rpc_port=free_port(HOST)), running.start_worker("d0")
        )
        await running.wait_ready()
        yield running


def greedy(max_tokens: int = 8) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, num_logprobs=5, ignore_eos=True)


def prompt(rng: Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 3900) for _ in range(num_tokens))


def check(checker: ExactnessChecker, responses: list[Response]) -> None:
    assert [response.failure for response in responses if response.failure] == []
    checker.check([answer for response in responses for answer in response.answers()])


@pytest.mark.fault("F-12")
async def test_failing_sequence_does_not_affect_its_batch(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    rng = Random(12)
    good = [Request(prompt=prompt(rng, 80), sampling=greedy(24)) for _ in range(6)]
    bad = Request(prompt=(*prompt(rng, 40), MARKER), sampling=greedy())
    responses = await send_all(cluster, [*good[:3], bad, *good[3:]])
    failed = [response for response in responses if response.failure]
    assert [response.request for response in failed] == [bad]
    assert failed[0].failure == "internal"
    check(checker, [response for response in responses if not response.failure])
    await cluster.check_clean()
    await auditor.audit(cluster)
    await cluster.until_workers("p0", "d0")


@pytest.mark.fault("F-13")
async def test_sequence_with_logits_that_are_not_finite_fails_alone_and_is_not_cached(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    rng = Random(13)
    good = [Request(prompt=prompt(rng, 80), sampling=greedy(24)) for _ in range(3)]
    bad = Request(prompt=(*prompt(rng, 63), MARKER + 1), sampling=greedy())
    responses = await send_all(cluster, [*good[:2], bad, *good[2:]])
    assert [response.failure for response in responses] == ["", "", "numerical_error", ""]
    check(checker, [response for response in responses if not response.failure])
    await cluster.check_clean()
    await auditor.audit(cluster)
    cached = await cached_blocks(cluster)
    failed_again = await send_all(cluster, [bad])
    assert failed_again[0].failure == "numerical_error"
    assert await cached_blocks(cluster) == cached, "the blocks of the failed step are in no cache"


async def cached_blocks(cluster: ProcessCluster) -> dict[str, int]:
    """Return the number of cached blocks of each worker, once nothing runs."""
    await cluster.check_clean()
    return {w.worker.worker_id: w.blocks.cached for w in (await cluster.status()).workers}


@pytest.mark.long  # `make test` covers this by test_transfer_between_processes.py, and by test_relay_faults.py
@pytest.mark.fault("F-8")
async def test_prefill_worker_restart_at_the_same_address_is_recognized(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    before = await cluster.status()
    old = next(w.worker for w in before.workers if w.worker.worker_id == "p0")
    await cluster.kill("p0")
    await cluster.start_worker("p0", rpc_port=int(old.address.rsplit(":", 1)[1]))  # still reserved
    status = await cluster.until(
        lambda s: any(w.worker.worker_id == "p0" and w.worker.worker_epoch != old.worker_epoch for w in s.workers),
        60,
        "a new epoch of p0",
    )
    new = next(w.worker for w in status.workers if w.worker.worker_id == "p0")
    assert new.address == old.address
    await cluster.wait_ready()
    responses = await send_all(cluster, random_requests(Random(8), 4, max_prompt=300, vocab_size=4000))
    check(checker, responses)
    assert any(leg.kv_bytes for response in responses if response.timeline for leg in response.timeline.legs), (
        "KV is read from the new incarnation"
    )
    await cluster.check_clean()
    await auditor.audit(cluster)


@pytest.mark.long  # `make test` covers this by test_http_limits.py, test_storm.py and test_nemesis.py
@pytest.mark.fault("F-34", "F-35")
@pytest.mark.parametrize("phase", ["queued", "prefill", "streaming"])
async def test_cancel_and_deadline_end_the_work_in_every_phase(
    cluster: ProcessCluster, auditor: CacheAuditor, phase: str
) -> None:
    rng = Random(34)
    num_prompt, max_tokens = {"queued": (2500, 8), "prefill": (3000, 8), "streaming": (50, 2000)}[phase]
    async with Client(cluster) as client:

        def start() -> list[asyncio.Task[Response]]:
            requests = [
                Request(prompt=prompt(rng, num_prompt), sampling=greedy(max_tokens))
                for _ in range(3 if phase == "queued" else 1)
            ]
            return [asyncio.create_task(client.send(request)) for request in requests]

        busy = await _until_in(cluster, phase, start)
        for task in busy[1:] or busy:
            task.cancel()  # the client disconnects
        await asyncio.gather(*busy[1:] or busy, return_exceptions=True)
        late = await client.send(Request(prompt=prompt(rng, num_prompt), sampling=greedy(max_tokens)), deadline_s=0.3)
        from_server, from_client = "deadline", "no answer within 0.3 s"
        assert from_server in late.failure.lower() or from_client in late.failure, late.failure
        await asyncio.gather(*busy, return_exceptions=True)
        await cluster.check_clean()
        if phase == "streaming":  # the same tokens again, for the audit: a busy machine delivers them late
            begun = [got.request for got in cluster.history if isinstance(got, Response) and not got.is_complete]
            assert not any(response.failure for response in await send_all(cluster, begun[-2:]))
    await cluster.check_clean()
    await auditor.audit(cluster)


async def _until_in(
    cluster: ProcessCluster, phase: str, start: Callable[[], list[asyncio.Task[Response]]]
) -> list[asyncio.Task[Response]]:
    """Start requests until some are seen in the phase: a busy machine may look too late."""
    for _ in range(MAX_TRIALS):
        busy = start()

        def is_decided(status: ClusterStatus, busy: list[asyncio.Task[Response]] = busy) -> bool:
            return _is_in(status, phase) or all(task.done() for task in busy)

        if _is_in(await cluster.until(is_decided, 60, phase), phase):
            return busy
    raise AssertionError(f"no request was seen in the phase {phase!r}")


def _is_in(status: ClusterStatus, phase: str) -> bool:
    workers = {w.worker.worker_id: w for w in status.workers}
    if phase == "queued":
        return workers["p0"].waiting_seqs > 0
    return workers["p0" if phase == "prefill" else "d0"].running_seqs > 0


@pytest.mark.long  # `make test` covers this by test_kv_reader.py, and by two layouts in test_rolling.py
@pytest.mark.fault("F-23")
async def test_workers_with_different_models_are_never_paired(tmp_path: Path) -> None:
    """The decode worker has another model under the same name. It pulls no KV and prefills locally."""
    other = tmp_path / "other"
    init_model(TINY_MODELS["qwen3"](), other, seed=9)
    async with process_cluster(prefill=1, decode=0, wait=False) as cluster:
        await cluster.start_worker("d0", model=str(other), served_model_name="demo")
        await cluster.until_workers("p0", "d0")
        status = await cluster.status()
        assert all(not w.links for w in status.workers), "no link between different layouts"
        async with Client(cluster) as client:
            response = await client.send(Request(prompt=(5, 6, 7), sampling=greedy()))
        assert response.timeline is not None, response.failure
        assert [(leg.worker_id, leg.kv_bytes) for leg in response.timeline.legs] == [("d0", 0)]
        await cluster.check_clean()
    ExactnessChecker(other).check(response.answers())


@pytest.mark.long  # `make test` runs it with emulated workers
@pytest.mark.fault("F-25")
async def test_requests_progress_with_decode_memory_for_little_more_than_one_prompt(
    checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    rng = Random(25)
    requests = [Request(prompt=prompt(rng, 380), sampling=greedy(16)) for _ in range(8)]
    async with process_cluster(
        prefill=1, decode=1, max_model_len=400, kv_memory=30 * DEMO_BLOCK_BYTES, pull_wait_s=20.0
    ) as cluster:
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
        await auditor.audit(cluster)
    check(checker, responses)
    assert all(response.is_complete for response in responses), "every admitted request makes progress"


@pytest.mark.fault("F-25")
async def test_requests_progress_on_emulated_workers_with_little_decode_memory() -> None:
    rng = Random(25)
    samplings = [Sampling(max_tokens=16, temperature=1.0, seed=number, ignore_eos=True) for number in range(8)]
    requests = [Request(prompt=prompt(rng, 380), sampling=sampling) for sampling in samplings]
    emulated = {"device": "emulated", "emulated_costs": "step=5ms,prefill_token=100us"}
    async with process_cluster(
        prefill=1, decode=1, max_model_len=400, kv_memory=30 * DEMO_BLOCK_BYTES, **{**LONG_TIMES, **emulated}
    ) as cluster:
        assert [worker.blocks.total for worker in (await cluster.status()).workers] == [30, 30]
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
    for response in responses:
        assert response.is_complete, f"every admitted request makes progress: {response.failure}"
        seed = response.request.sampling.seed
        right = emulated_answer(response.request.prompt, seed=seed, max_tokens=16, vocab_size=4096)
        assert list(response.tokens[0]) == right


@pytest.mark.long  # `make test` covers this by test_rolling.py and tests/sim/test_rolling_release.py
@pytest.mark.fault("F-47", "F-48")
async def test_drained_workers_lose_no_request(checker: ExactnessChecker, auditor: CacheAuditor) -> None:
    rng = Random(48)
    async with process_cluster(prefill=2, decode=2, **LONG_TIMES) as cluster, Client(cluster) as client:
        streams = [
            asyncio.create_task(client.send(Request(prompt=prompt(rng, 600), sampling=greedy(60))))
            for _ in range(sized(5, 8))
        ]
        await cluster.until(lambda s: any(w.open_leases for w in s.workers), 20, "a transfer is under way")
        codes = await asyncio.gather(cluster.stop_one("p0"), cluster.stop_one("d0"))
        responses = list(await asyncio.gather(*streams))
        assert codes == [0, 0]
        check(checker, responses)
        assert (await client.send(Request(prompt=prompt(rng, 50), sampling=greedy()))).is_complete
        await cluster.check_clean()
        await auditor.audit(cluster)
