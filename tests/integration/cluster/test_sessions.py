"""Multi-turn sessions on emulated workers: the generated blocks of a turn are a prefix source for the next.

The KV of an answer exists on the decode worker alone. The tokens of an emulated worker follow from the
content of the whole context in its KV memory, so a wrong block gives a wrong answer.
"""

import asyncio
from collections.abc import AsyncIterator
from random import Random

import pytest
import pytest_asyncio

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.request import Sampling
from baton.engine.executors.emulated_model import EmulatedModel, read_emulated_model
from baton.model.loading.model_source import DEMO_DIR
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.channel import channel_options, open_channel
from tests.cluster import ProcessCluster, process_cluster
from tests.emulated_answer import emulated_answer
from tests.integration.cluster.clients import Client, Request, Response
from tests.scale import sized
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK_SIZE_TOKENS = 16
FIRST_TOKENS, ANSWER_TOKENS, MORE_TOKENS, NUM_TURNS = 600, 200, 60, sized(3, 4)
MAX_MODEL_LEN = 4096
MODEL: EmulatedModel = read_emulated_model(DEMO_DIR, dtype="float32", max_model_len=MAX_MODEL_LEN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ProcessCluster]:
    """A cluster whose decode worker computes no prompts while it decodes: its answers are late already."""
    settings = {
        "device": "emulated",
        "emulated_costs": "step=5ms,prefill_token=1ms,decode_seq=100us",
        "tpot_target_factor": 1.01,
        "policy": "kv_centric",
        "transfer": "nixl",
        "kv_memory": 256 * 2**20,
        "max_model_len": MAX_MODEL_LEN,
        **LONG_TIMES,
        "heartbeat_s": 1.0,
    }
    async with process_cluster(prefill=2, decode=1, **settings) as running:
        await running.until(lambda s: sum(len(w.links) for w in s.workers) >= 2, 30, "all pairs are warm")
        yield running


def tokens(rng: Random, number: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, MODEL.vocab_size) for _ in range(number))


async def decision(cluster: ProcessCluster, response: Response) -> DecisionRecord:
    assert response.timeline is not None
    async with open_channel(cluster.grpc_address, channel_options(10.0)) as channel:
        admin = AdminClient(channel, cluster.grpc_address, call_s=60.0)
        return (await admin.explain(response.timeline.request_id))[-1]


async def keep_decoding(cluster: ProcessCluster, rng: Random) -> None:
    """Send long requests forever, so that the decode worker has no steps to spare."""
    sampling = Sampling(max_tokens=800, temperature=0.0, ignore_eos=True)
    async with Client(cluster) as client:
        while True:
            await asyncio.gather(*(client.send(Request(prompt=tokens(rng, 20), sampling=sampling)) for _ in range(24)))


async def test_answer_is_a_prefix_source_for_the_next_turn(cluster: ProcessCluster) -> None:
    """Whichever worker prefills a turn, it computes what is new and the last block of the turn before."""
    rng, records, computed_at = Random(3), [], set()
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    busy = asyncio.create_task(keep_decoding(cluster, Random(4)))
    try:
        await asyncio.sleep(1.0)
        async with Client(cluster) as client:
            prompt = tokens(rng, FIRST_TOKENS)
            for turn in range(NUM_TURNS):
                response = await client.send(Request(prompt=prompt, sampling=sampling, session="conversation"))
                assert response.is_complete, response.failure
                assert response.usage is not None
                assert response.timeline is not None
                answer = emulated_answer(prompt, seed=0, max_tokens=ANSWER_TOKENS, vocab_size=MODEL.vocab_size)
                assert response.tokens[0] == answer
                if turn:
                    before = len(prompt) - MORE_TOKENS
                    assert response.usage.num_cached_tokens >= (before - 1) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
                    computed_at.add(response.timeline.legs[0].worker_id)
                records.append(await decision(cluster, response))
                prompt = (*prompt, *answer, *tokens(rng, MORE_TOKENS))
                await asyncio.sleep(1.0)  # the client's pause
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    sources = [r.placement.prefix_source for r in records if r.placement is not None and r.placement.prefix_source]
    assert {source.worker.worker_id for source in sources} == {"d0"}, f"{computed_at} computed later turns"
    assert computed_at - {"d0"}
    assert [record.query.session_key for record in records] == ["conversation"] * NUM_TURNS
    turns = [record.session for record in records]
    assert [turn and turn.turn for turn in turns] == [*range(1, NUM_TURNS + 1)]
    assert all(turn is not None and turn.gap_s is not None and turn.gap_s >= 0.5 for turn in turns[1:])
