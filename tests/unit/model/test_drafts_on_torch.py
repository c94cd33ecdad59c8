"""Drafts on a tiny model: answers, logprobs and failures equal those of steps without drafts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.core.kv.block_hash import BlockHash, TokenIds, token_ids
from baton.core.request import Sampling
from baton.engine.speculation.drafter import Draft
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence
from baton.model.backends.backend_selection import choose_backend
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.torch_executor import TorchExecutor
from tests.builders import sequence_request
from tests.scale import sized
from tests.unit.engine.speculation.byte_grammars import new_constraints
from tests.unit.engine.speculation.drafted_run import assert_same_answers, random_requests, reference
from tests.unit.engine.speculation.reference_drafter import ReferenceDrafter

SIZE, PROMPT = 4, [9, 8, 7, 6, 5]
NUM_REQUESTS, NUM_SEEDS = 8, sized(1, 12)


@pytest.fixture(scope="module")
def loaded(tiny_dir: Path) -> LoadedModel:
    return load_model(tiny_dir, device="cpu")


@pytest.fixture
def executor(loaded: LoadedModel) -> Iterator[TorchExecutor]:
    cache = KvCache.zeros(loaded.layout(SIZE), 64)
    cache.fill_with_nan()  # a read of unwritten KV fails the sequence
    backend = choose_backend(loaded, kernels="torch", num_threads=1, block_size_tokens=SIZE)
    executor = TorchExecutor(
        loaded.model, cache, thread=compute_thread(1), backend=backend, constraints=new_constraints()
    )
    yield executor
    executor.close()


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "auto"])
async def test_answers_with_drafts_equal_those_without(executor: TorchExecutor, kind: str) -> None:
    async def run_step(plan: StepPlan) -> StepResult:
        return executor.run(plan)

    num_accepted = num_drafts = 0
    for seed in range(NUM_SEEDS):
        rng = Random(seed)
        requests = random_requests(rng, NUM_REQUESTS)
        expected = await reference(run_step, requests)
        run = await assert_same_answers(kind, run_step, requests, expected, rng, tolerance=1e-3)
        num_accepted += run.engine.counters.accepted_draft_tokens
        num_drafts += run.engine.counters.draft_tokens
    assert num_drafts > 10
    assert num_accepted > 3 or kind == "wrong"


def step(executor: TorchExecutor, outputs: list[int], drafts: tuple[int, ...] = (), **sampling: Any) -> StepResult:
    """Compute prompt, outputs and drafts in one step, and draw after the outputs and each draft."""
    tokens = [*PROMPT, *outputs]
    sample = SampleRequest(
        sampling=Sampling(**{"max_tokens": 30, "num_logprobs": 2, "temperature": 0.0} | sampling),
        sample_indices=(0,),
        position=len(tokens),
        history=token_ids(tokens),
        num_prompt_tokens=len(PROMPT),
        drafts=drafts,
    )
    part = StepSequence(
        seq_id=1,
        token_ids=token_ids([*tokens, *drafts]),
        position_begin=0,
        kv_begin=0,
        block_table=(3, 1, 2, 5, 7),
        sample=sample,
    )
    other = replace(part, seq_id=2, token_ids=token_ids([4]), block_table=(9,), sample=None)
    return executor.run(StepPlan(step_id=1, sequences=(other, part, replace(other, seq_id=3, block_table=(10,)))))


def one_by_one(executor: TorchExecutor, count: int, **sampling: Any) -> list[SampledToken]:
    """Return tokens that are drawn in steps without drafts."""
    found: list[SampledToken] = []
    for _ in range(count):
        found += step(executor, [token.token_id for token in found], **sampling).samples[1]
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 3.0},
    ],
)
def test_right_drafts_give_all_tokens_with_their_logprobs(executor: TorchExecutor, sampling: dict[str, Any]) -> None:
    expected = one_by_one(executor, 6, **sampling)
    ids = [token.token_id for token in expected]
    found = step(executor, ids[:1], tuple(ids[1:5]), **sampling).samples[1]
    assert [token.token_id for token in found] == ids[1:]
    for one, other in zip(found, expected[1:], strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


def test_tokens_end_after_the_first_wrong_draft(executor: TorchExecutor) -> None:
    ids = [token.token_id for token in one_by_one(executor, 4)]
    for wrong in range(3):
        drafts = [*ids[:wrong], ids[wrong] + 1, *ids[wrong + 1 : 3]]
        assert [t.token_id for t in step(executor, [], tuple(drafts)).samples[1]] == ids[: wrong + 1]


class PoisonDrafter(ReferenceDrafter):
    """Drafts right tokens, then one whose KV is NaN."""

    poison = 0

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        draft = super().draft(key, token_ids, tenant)
        return draft and Draft((*draft.tokens[:2], self.poison))


async def test_nan_in_a_wrong_draft_fails_nothing(executor: TorchExecutor, loaded: LoadedModel) -> None:
    """The sequence runs without drafts then, and its answer is the same."""

    async def run_step(plan: StepPlan) -> StepResult:
        result = executor.run(plan)
        failed.extend(result.failures)
        return result

    failed: list[int] = []
    rng = Random(1)
    requests = [sequence_request(i, [i, 8, 7], max_tokens=9, sampling={"temperature": 0.0}) for i in (1, 2)]
    expected = await reference(run_step, requests)
    seen = {token.token_id for one in expected.values() for token in one.tokens}
    embedding: Any = loaded.model.get_input_embeddings().weight
    PoisonDrafter.poison = next(t for t in range(10, 256) if t not in seen)
    kept = embedding[PoisonDrafter.poison].clone()
    try:
        embedding[PoisonDrafter.poison] = float("nan")
        await assert_same_answers("right", run_step, requests, expected, rng, 1e-3, new_drafter=PoisonDrafter)
    finally:
        embedding[PoisonDrafter.poison] = kept
    assert failed, "no draft with NaN was verified"


def test_step_of_drafts_only_is_refused(executor: TorchExecutor) -> None:
    sample = SampleRequest(
        sampling=Sampling(max_tokens=3), sample_indices=(0,), position=1, history=token_ids([1]), num_prompt_tokens=1,
        drafts=(5, 6),
    )  # fmt: skip
    part = StepSequence(
        seq_id=1, token_ids=token_ids([5, 6]), position_begin=0, kv_begin=0, block_table=(1,), sample=sample
    )
    result = executor.run(StepPlan(step_id=1, sequences=(part,)))
    assert "2 drafts among 2 tokens" in result.failures[1].message
