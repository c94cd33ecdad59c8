"""SIGKILL of decode workers that verify drafts: answers equal those without drafts, and nothing leaks."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from baton.core.request import Sampling
from baton.model.loading.model_source import DEMO_DIR
from tests.cache_audit import CacheAuditor
from tests.cluster import ProcessCluster, process_cluster
from tests.exactness import ExactnessChecker
from tests.integration.cluster.clients import Client, Request, Response

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
DEEP_LAYERS = 24


@dataclass(frozen=True, slots=True)
class DraftedCluster:
    """A cluster whose decode workers verify drafts of `drafter`, and the checks of its answers and caches."""

    processes: ProcessCluster
    drafter: str
    checker: ExactnessChecker
    auditor: CacheAuditor

    async def num_accepted(self, worker: str) -> float:
        """Return how many drafts of the drafter have become output on a worker."""
        samples = await self.processes.scrape(worker)
        return sum(
            sample.value
            for sample in samples
            if sample.name == "baton_accepted_draft_tokens_total" and sample.labels["drafter"] == self.drafter
        )


def deep_demo_model(directory: Path) -> Path:
    """Write the demo model with more layers that add nothing: it computes the same, and takes longer.

    So the demo model is a draft model for it that is always right, and cheap enough to pay.
    """
    path = directory / "deep"
    shutil.copytree(DEMO_DIR, path)
    config = json.loads((path / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    config |= {"num_hidden_layers": DEEP_LAYERS, "layer_types": config["layer_types"][:1] * DEEP_LAYERS}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    first = "model.layers.0."
    for name in [name for name in tensors if name.startswith(first)]:
        values = tensors[name]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values = torch.zeros_like(values)
        for layer in range(num_layers, DEEP_LAYERS):
            tensors[f"model.layers.{layer}.{name.removeprefix(first)}"] = values.clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ngram", "model"])
async def cluster(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checker: ExactnessChecker,
    auditor: CacheAuditor,
) -> AsyncIterator[DraftedCluster]:
    settings: dict[str, Any] = {"speculate": "ngram"}
    if request.param == "model":
        model = deep_demo_model(tmp_path_factory.mktemp("model"))
        checker, auditor = ExactnessChecker(model), CacheAuditor(model)
        settings = {"speculate": f"draft:{DEMO_DIR}", "model": str(model), "kv_memory": 256 * 2**20}
    async with process_cluster(prefill=1, decode=2, transfer="local", admin_port=0, **settings, **TIMES) as running:
        yield DraftedCluster(running, request.param, checker, auditor)


def drafted_requests(rng: Random, drafter: str) -> list[Request]:
    """Return greedy and sampled requests, of one and of two samples.

    Prompts for n-grams repeat a text, which the answers go on to do. Those for a draft model do not, because
    n-grams would leave it nothing to do. Half of the answers end with a stop token, which cannot come early.
    """
    text = [rng.randrange(4, DEMO_VOCAB) for _ in range(16)]
    return [
        Request(
            prompt=tuple(text * 8 if drafter == "ngram" else (rng.randrange(4, DEMO_VOCAB) for _ in range(128))),
            sampling=Sampling(
                max_tokens=240,
                min_tokens=80 if number % 2 else 0,
                stop_token_ids=tuple(text) if number % 2 else (),
                temperature=0.3 if number < 2 else 0.0,
                repetition_penalty=1.02 if number % 3 == 0 else 1.0,
                seed=rng.getrandbits(31),
                num_logprobs=5,
                ignore_eos=True,
            ),
            num_samples=1 + (number == 1),
        )
        for number in range(4)
    ]


def check_ends(responses: list[Response]) -> None:
    """Check that each answer ends with its first stop token from `min_tokens` on, or at its full length."""
    for response in responses:
        sampling = response.request.sampling
        for tokens in response.tokens.values():
            assert sampling.min_tokens < len(tokens) <= sampling.max_tokens
            assert not set(sampling.stop_token_ids) & set(tokens[:-1])
            assert len(tokens) == sampling.max_tokens or tokens[-1] in sampling.stop_token_ids


@pytest.mark.fault("F-4", "F-40")
@pytest.mark.parametrize("number", range(5))
async def test_decode_worker_crash_with_drafts_changes_no_token(cluster: DraftedCluster, number: int) -> None:
    rng, processes = Random(number), cluster.processes
    for _ in range(MAX_TRIALS):
        victim = rng.choice(DECODE)
        responses = await kill_while_decoding(processes, victim, drafted_requests(rng, cluster.drafter))
        assert [response.failure for response in responses if response.failure] == []
        assert all(response.is_complete for response in responses)
        cluster.checker.check([answer for response in responses for answer in response.answers()])
        check_ends(responses)
        await processes.check_clean()
        await cluster.auditor.audit(processes)
        (other,) = set(DECODE) - {victim}
        has_drafted = await cluster.num_accepted(other) > 0
        await processes.start_worker(victim)
        await processes.until_workers(*ALL)
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
