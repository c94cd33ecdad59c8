"""Emulated workers as processes. Their tokens are a function of KV that was really transferred over NIXL."""

import asyncio
from random import Random

import pytest

from baton.core.request import Sampling
from tests.cluster import process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.cluster.clients import Client, Request, Response
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

VOCAB_SIZE, NUM_TOKENS, STEP_MS = 4096, 40, 4
MAX_LATE_S = 0.02
"""Time by which a step may be shorter because the one before it ended late."""
LONG_LIMITS = {"device": "emulated", "emulated_costs": f"step={STEP_MS}ms,prefill_token=20us", **LONG_TIMES}


def new_request(number: int, num_prompt_tokens: int = 700) -> Request:
    rng = Random(number)
    prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(num_prompt_tokens))
    return Request(
        prompt=prompt, sampling=Sampling(max_tokens=NUM_TOKENS, temperature=1.0, seed=number, num_logprobs=1)
    )


def check(response: Response) -> None:
    assert response.is_complete, response.failure
    sampling = response.request.sampling
    right = emulated_answer(
        response.request.prompt, seed=sampling.seed, max_tokens=sampling.max_tokens, vocab_size=VOCAB_SIZE
    )
    assert response.tokens[0] == right


@pytest.mark.long  # `make test` covers this by test_placement.py and tests/unit/engine/test_emulated.py
async def test_answers_are_exact_with_pulled_cached_and_computed_kv_and_steps_take_time() -> None:
    """Without drafts, because those of a repeated prompt are right, and many tokens then take one step."""
    async with (
        process_cluster(speculate="off", **LONG_LIMITS) as cluster,
        Client(cluster) as client,
    ):
        pulled, cached = await client.send(new_request(7)), await client.send(new_request(7))
        for response in (pulled, cached):
            check(response)
            assert response.timeline is not None
            assert [leg.worker_id for leg in response.timeline.legs] == ["p0", "d0"]
            # Not the time per token: on a busy machine the first one may be delivered with those after it.
            assert response.timeline.total_s > NUM_TOKENS * STEP_MS / 1000 - MAX_LATE_S
        assert pulled.timeline is not None
        assert pulled.timeline.legs[1].kv_bytes >= 700 * 6 * 2 * 2 * 64 * 4, (
            "the whole prompt: layers, keys and values, heads, float32"
        )
        assert pulled.timeline.legs[1].transport
        assert {worker.model for worker in (await cluster.status()).workers} == {"demo (emulated)"}
        await cluster.kill("p0")
        await cluster.until_workers("d0")
        check(await client.send(new_request(8)))
        await cluster.check_clean()
        cluster.check_alive()


@pytest.mark.long
@pytest.mark.fault("F-27")
async def test_redis_that_is_down_at_the_start_delays_only_the_start() -> None:
    async with process_cluster(device="emulated", emulated_costs=f"step={STEP_MS}ms,prefill_token=20us") as cluster:
        names = ("scheduler", "gateway", "p0", "d0")
        for name in (*names, "redis"):
            await cluster.kill(name)
        for name in names:
            await cluster.start_again(name)
        await asyncio.sleep(3.0)
        cluster.check_alive()
        await cluster.start_again("redis")
        await cluster.until_workers("p0", "d0")
        await cluster.wait_ready()
        async with Client(cluster) as client:
            check(await client.send(new_request(9)))
        await cluster.check_clean()
        cluster.check_alive()
