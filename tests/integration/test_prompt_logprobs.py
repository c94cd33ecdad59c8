"""Logprobs of prompt tokens: equal to those of transformers, also with cached prefixes and preemption."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.core.request import PromptLogprobs, Sampling
from baton.engine.scheduling.batcher import MAX_PROMPT_ROWS
from baton.engine.state.step import StepPlan
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.random_init import init_model
from tests.integration.test_model_exactness import (
    TINY_MODELS,
    Question,
    Worker,
    loaded_for,
    random_prompts,
    worker_of,
)

pytestmark = pytest.mark.integration
TOP = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["demo", "mistral-window"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return DEMO_DIR
    path = tmp_path_factory.mktemp(request.param) / "model"
    init_model(TINY_MODELS[request.param](), path, seed=1)
    return path


def reference(model_dir: Path, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return the log probabilities of transformers, [num_tokens, vocab_size] each."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1) for prompt in prompts]


def run(worker: Worker, questions: list[Question]) -> tuple[list[PromptLogprobs], list[StepPlan]]:
    """Return the prompt logprobs of each question, and the plans of the steps."""
    ids, plans = [], []
    for question in questions:
        worker._next_id += 1
        ids.append(worker._next_id)
        worker.engine.add(worker._request(worker._next_id, question))
    found: dict[int, list[PromptLogprobs]] = {seq_id: [] for seq_id in ids}
    while not (plan := worker.engine.plan()).is_empty:
        plans.append(plan)
        for output in worker.engine.apply(plan, worker.executor.run(plan)).outputs:
            assert output.failure is None
            if output.prompt_logprobs is not None:
                found[output.seq_id].append(output.prompt_logprobs)
        worker.engine.check()
    assert all(len(each) <= 1 for each in found.values()), "they are reported once, also with several samples"
    return [each[0] if each else PromptLogprobs(num_top=0) for each in found.values()], plans


def asked(prompt: tuple[int, ...], num: int | None = TOP, max_tokens: int = 3, num_samples: int = 1) -> Question:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, num_prompt_logprobs=num, ignore_eos=True)
    return Question(prompt=prompt, sampling=sampling, num_samples=num_samples)


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.long), "auto"])
def test_prompt_logprobs_equal_those_of_transformers(model_dir: Path, kernels: str) -> None:
    loaded = loaded_for(model_dir, kernels)
    vocab_size = int(loaded.model.config.vocab_size)
    prompts = [(7,), *random_prompts(Random(5), 10, vocab_size, longest=150)]
    prompts.append(prompts[-1])
    expected = reference(model_dir, prompts)
    with worker_of(loaded, num_blocks=24) as worker:
        run(worker, [asked(prompt, None) for prompt in prompts[:6]])  # fills the prefix cache
        questions = [asked(p, TOP if i % 3 else 0, 20, 1 + i % 2) for i, p in enumerate(prompts)]
        found, plans = run(worker, questions)
        assert worker.engine.counters.preemptions, "the pool is too small for all"
    for plan in plans:
        assert sum(len(part.prompt.targets) for part in plan.sequences if part.prompt) <= MAX_PROMPT_ROWS
    with worker_of(loaded, num_blocks=24) as worker:  # alone in a step, without alternatives
        assert [len(got) for got in run(worker, [asked((7,), 0, 1), asked((7, 8), 0, 1)])[0]] == [0, 1]
    for number, (prompt, got, logprobs) in enumerate(zip(prompts, found, expected, strict=True)):
        assert len(got) == len(prompt) - 1
        for position in range(len(got)):
            entry, rank = got.at(position), got.ranks[position]
            row, token = logprobs[position], prompt[position + 1]
            assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
            assert abs(rank - 1 - int((row > row[token]).sum())) <= int((row - row[token]).abs().lt(2e-4).sum())
            assert len(entry.top) == (TOP if number % 3 else 0)
            best = row.topk(max(1, len(entry.top))).values
            for (token_id, value), most in zip(entry.top, best.tolist(), strict=False):
                assert value == pytest.approx(float(row[token_id]), abs=2e-4)
                assert value == pytest.approx(most, abs=2e-4)
