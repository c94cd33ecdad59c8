"""Tokens of every topology equal the reference in float32, and with KV in int8 those of one worker.

Processes and transfers are real.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from baton.core.request import Sampling
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.random_init import init_model
from tests.cache_audit import CacheAuditor
from tests.cluster import DEMO_BLOCK_BYTES, ProcessCluster, process_cluster
from tests.exactness import Exactness, ExactnessChecker
from tests.integration.cluster.clients import Request, Response, random_requests, send_all
from tests.integration.cluster.constrained_requests import check_constrained, constrained_requests
from tests.integration.test_model_exactness import TINY_MODELS
from tests.scale import sized
from tests.times import LONG_TIMES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

DEMO_VOCAB = 4096
INT8_BLOCK_BYTES = 16 * 6 * 2 * 2 * (64 + 2)
"""KV in int8 of 16 tokens of the demo model: per head 64 bytes and a scale of 2 bytes, 52 % of bfloat16."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disaggregated() -> AsyncIterator[ProcessCluster]:
    async with process_cluster(prefill=1, decode=1, transfer="nixl", **LONG_TIMES) as cluster:
        yield cluster


def check(checker: ExactnessChecker, responses: list[Response]) -> Exactness:
    assert [response.failure for response in responses if response.failure] == []
    assert all(response.is_complete for response in responses)
    return checker.check([answer for response in responses for answer in response.answers()])


def kv_bytes(response: Response) -> int:
    """Return the bytes of KV that an answer has pulled."""
    assert response.timeline is not None
    return sum(leg.kv_bytes for leg in response.timeline.legs)


async def test_disaggregated_answers_over_nixl_are_exact(
    disaggregated: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    requests = random_requests(Random(1), sized(24, 150), max_prompt=sized(700, 3000), vocab_size=DEMO_VOCAB)
    responses = await send_all(disaggregated, requests)
    await disaggregated.check_clean()
    await auditor.audit(disaggregated)
    check(checker, responses)
    pulled = [leg for response in responses if response.timeline for leg in response.timeline.legs if leg.kv_bytes]
    assert len(pulled) > len(requests) / 2, "most answers need a transfer"
    assert any(response.usage and response.usage.num_cached_tokens for response in responses), (
        "some prompts hit the prefix cache"
    )


async def test_several_samples_share_one_transfer(
    disaggregated: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    requests = random_requests(Random(3), sized(8, 60), max_prompt=300, vocab_size=DEMO_VOCAB, num_samples=3)
    responses = await send_all(disaggregated, requests)
    await disaggregated.check_clean()
    await auditor.audit(disaggregated)
    check(checker, responses)
    assert all(len(response.tokens) == 3 for response in responses)
    samples = {
        tuple(map(tuple, response.tokens.values())) for response in responses if not response.request.sampling.is_greedy
    }
    assert any(len(set(sample)) > 1 for sample in samples), "seeded samples of one prompt differ"


async def test_prompt_logprobs_of_disaggregated_answers_equal_the_reference(disaggregated: ProcessCluster) -> None:
    rng = Random(9)
    prompts = [rng.choices(range(DEMO_VOCAB), k=length) for length in (1, 2, 17, 200)] * 2
    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval()
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "prompt_logprobs": 0, "temperature": 0}
    async with httpx.AsyncClient(base_url=disaggregated.url, timeout=60) as client:
        for more in ({"max_tokens": 0}, {"max_tokens": 6, "n": 2}, {"max_tokens": 1}):
            answer = await client.post("/v1/completions", json=body | more)
            assert answer.status_code == 200, answer.text
            for choice in answer.json()["choices"]:
                prompt = prompts[choice["index"] // more.get("n", 1)]
                with torch.no_grad():
                    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
                values = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
                found = choice["logprobs"]["token_logprobs"]
                assert found[: len(prompt)] == [None, *(pytest.approx(value, abs=2e-4) for value in values)]
                by_id = [
                    entry[str(token)] for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
                ]
                assert [entry["logprob"] for entry in by_id] == found[1 : len(prompt)]
                assert len(found) >= len(prompt) + (more["max_tokens"] > 0)
    await disaggregated.check_clean()


@pytest.mark.long  # `make test` covers this by tests/sim/test_constrained.py and test_constrained_exactness.py
async def test_constrained_samples_of_disaggregated_answers_equal_the_reference(disaggregated: ProcessCluster) -> None:
    responses = await send_all(disaggregated, constrained_requests(0))
    await disaggregated.check_clean()
    check_constrained(AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval(), responses)
    assert all(any(leg.kv_bytes for leg in response.timeline.legs) for response in responses if response.timeline)


@pytest.mark.long  # `make test` covers this by test_constrained_exactness.py, in one process
async def test_constrained_samples_of_preempted_sequences_equal_the_reference() -> None:
    requests = [request for number in range(3) for request in constrained_requests(number)]
    async with process_cluster(
        prefill=0, decode=0, hybrid=1, kv_memory=40 * DEMO_BLOCK_BYTES, max_model_len=400, admin_port=0
    ) as cluster:
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
        assert await cluster.metric("h0", "baton_preemptions_total") > 0
    check_constrained(AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval(), responses)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        pytest.param({"prefill": 2, "decode": 2}, {"transfer": "nixl"}, marks=pytest.mark.long),
        pytest.param({"prefill": 0, "decode": 0, "hybrid": 1}, {}, marks=pytest.mark.long),
        pytest.param({"prefill": 1, "decode": 1}, {"transfer": "local"}, marks=pytest.mark.long),
        pytest.param({"prefill": 1, "decode": 1}, {"transfer": "collective"}),
        pytest.param({"prefill": 2, "decode": 2}, {"transfer": "collective"}, marks=pytest.mark.long),
        pytest.param({"prefill": 2, "decode": 2}, {"transfer": "auto"}, marks=pytest.mark.long),
    ],
    ids=["2P+2D", "hybrid", "shared-memory", "gloo-1P+1D", "gloo-2P+2D", "auto-2P+2D"],
)
async def test_answers_of_other_topologies_are_exact(
    checker: ExactnessChecker, auditor: CacheAuditor, shape: dict[str, int], settings: dict[str, Any]
) -> None:
    requests = random_requests(Random(2), sized(10, 60), max_prompt=600, vocab_size=DEMO_VOCAB)
    async with process_cluster(**shape, **settings, **LONG_TIMES) as cluster:
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
        await auditor.audit(cluster)
    check(checker, responses)


async def test_answers_with_kv_in_int8_are_those_of_one_worker() -> None:
    """One request at a time, so that both topologies run the same steps and logprobs are equal, too."""
    rng = Random(6)
    sampling = Sampling(max_tokens=24, temperature=0.0, num_logprobs=5, ignore_eos=True)
    requests = [
        Request(prompt=tuple(rng.choices(range(4, DEMO_VOCAB), k=length)), sampling=sampling)
        for length in (1, 16, 17, 100, 333, 700)
    ]
    settings = {"dtype": "bfloat16", "kv_dtype": "int8", "transfer": "nixl", "speculate": "off", **LONG_TIMES}
    async with process_cluster(prefill=1, decode=1, **settings) as cluster:
        apart = await send_all(cluster, requests, in_flight=1)
        await cluster.check_clean()
        await asyncio.gather(cluster.stop_one("p0"), cluster.stop_one("d0"), cluster.start_worker("h0"))
        await cluster.until_workers("h0")
        together = await send_all(cluster, requests, in_flight=1)
        await cluster.check_clean()
    assert all(response.is_complete for response in apart + together)
    assert [response.answers() for response in apart] == [response.answers() for response in together]
    num_blocks = [-(-len(request.prompt) // 16) for request in requests]
    assert [kv_bytes(response) for response in apart] == [number * INT8_BLOCK_BYTES for number in num_blocks]
    assert not any(kv_bytes(response) for response in together)


@pytest.mark.long  # `make test` covers this by test_model_exactness.py, in one process
async def test_preemption_for_lack_of_blocks_keeps_answers_exact(
    checker: ExactnessChecker, auditor: CacheAuditor
) -> None:
    rng = Random(4)
    requests = [
        Request(
            prompt=request.prompt, sampling=replace(request.sampling, max_tokens=120, ignore_eos=True)
        )  # all sequences outgrow their first blocks
        for request in random_requests(rng, sized(16, 60), max_prompt=200, vocab_size=DEMO_VOCAB)
    ]
    async with process_cluster(
        prefill=0,
        decode=0,
        hybrid=1,
        kv_memory=40 * DEMO_BLOCK_BYTES,
        max_model_len=400,
        admin_port=0,
        scheduler_wait_s=30.0,
    ) as cluster:
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
        await auditor.audit(cluster)
        assert await cluster.metric("h0", "baton_preemptions_total") > 0
    check(checker, responses)


@pytest.mark.long  # `make test` runs the same models in one process: test_model_exactness.py
@pytest.mark.parametrize("name", list(TINY_MODELS))
async def test_answers_of_other_architectures_are_exact(name: str, tmp_path: Path) -> None:
    make: Callable[[], PreTrainedConfig] = TINY_MODELS[name]
    directory = tmp_path / "model"
    init_model(make(), directory, seed=5)
    requests = random_requests(Random(5), sized(12, 60), max_prompt=400, vocab_size=512)
    async with process_cluster(
        prefill=1, decode=1, transfer="nixl", model=str(directory), served_model_name="tiny", scheduler_wait_s=30.0
    ) as cluster:
        responses = await send_all(cluster, requests)
        await cluster.check_clean()
        await CacheAuditor(directory).audit(cluster)
    check(ExactnessChecker(directory), responses)
