"""SIGKILL of decode workers that verify drafts: answers equal those without drafts, and nothing leaks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio
from transformers import Qwen3Config

from baton.core.request import Sampling
from baton.model.loading.random_init import init_model
from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response
from tests.model_families import TINY

# `make test` covers this by test_kills.py without drafts, by test_drafts_on_torch.py and test_draft_model_on_torch.py
# in one process, and by the storms of tests/sim, which have draft models.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

ALL, DECODE = ("p0", "d0", "d1"), ("d0", "d1")
TIMES = {"heartbeat_s": 0.5, "detection_s": 3.0, "scheduler_wait_s": 30.0, "step_limit_s": 60.0}
MAX_TRIALS = 5
DEMO_VOCAB = 4096


def tiny_draft_model(directory: Path) -> Path:
    """Write a tiny model with the demo model's tokenizer. Its drafts are cheap, and nearly all are wrong."""
    path = directory / "draft"
    init_model(Qwen3Config(**{**TINY, "vocab_size": DEMO_VOCAB}, head_dim=16), path, seed=1)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngram", "draft"])
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessCluster]:
    speculate = request.param
    if speculate == "draft":
        speculate = f"draft:{tiny_draft_model(tmp_path_factory.mktemp('draft'))}"
    async with process_cluster(
        prefill=1, decode=2, transfer="local", speculate=speculate, admin_port=0, **TIMES
    ) as running:
        yield running


def copying_requests(rng: Random, count: int) -> list[Request]:
    """Return requests whose prompts repeat a text, which the answers go on to do: greedy and sampled ones."""
    text = [rng.randrange(4, DEMO_VOCAB) for _ in range(16)]
    return [
        Request(
            prompt=tuple(text * 8),
            sampling=Sampling(
                max_tokens=240,
                temperature=0.0 if number % 2 else 0.3,
                repetition_penalty=1.02 if number % 3 == 0 else 1.0,
                seed=rng.getrandbits(31),
                num_logprobs=5,
                ignore_eos=True,
            ),
        )
        for number in range(count)
    ]


@pytest.mark.fault("F-4", "F-40")
@pytest.mark.parametrize("number", range(5))
async def test_decode_worker_crash_with_drafts_changes_no_token(
    cluster: ProcessCluster, checker: ExactnessChecker, auditor: CacheAuditor, number: int
) -> None:
    rng = Random(number)
    for _ in range(MAX_TRIALS):
        victim = rng.choice(DECODE)
        responses = await kill_while_decoding(cluster, victim, copying_requests(rng, 4))
        assert [response.failure for response in responses if response.failure] == []
        checker.check([answer for response in responses for answer in response.answers()])
        await cluster.check_clean()
        await auditor.audit(cluster)
        (other,) = set(DECODE) - {victim}
        has_drafted = await cluster.metric(other, "baton_draft_tokens_total") > 0
        await cluster.start_worker(victim)
        await cluster.until_workers(*ALL)
        if has_drafted and max(response.timeline.attempts for response in responses if response.timeline) > 1:
            return
    raise AssertionError("no kill has hit a stream with drafts")


async def kill_while_decoding(cluster: ProcessCluster, victim: str, requests: list[Request]) -> list[Response]:
    """Send the requests, kill the victim once it decodes one, and wait for all answers."""
    async with Client(cluster) as client:
        streams = [asyncio.create_task(client.send(request)) for request in requests]
        await cluster.until(
            lambda status: (
                any(w.worker.worker_id == victim and w.running_seqs for w in status.workers)
                or all(stream.done() for stream in streams)
            ),
            60.0,
            f"{victim} decodes",
        )
        await asyncio.sleep(0.2)
        await cluster.kill(victim)
        return list(await asyncio.gather(*streams))
