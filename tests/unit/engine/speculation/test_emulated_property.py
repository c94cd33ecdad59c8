"""Answers with drafts equal those without on the emulated device, which detects every wrong KV slot."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from baton.engine.executors.emulated import EmulatedExecutor
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation import sequence_drafts
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.speculation.modes import open_speculation
from tests import builders
from tests.builders import BLOCK_SIZE_TOKENS, sequence_request
from tests.fake_executor import FakeGenerationTable
from tests.scale import sized
from tests.unit.engine.speculation.byte_grammars import EOS, VOCAB_SIZE, new_constraints
from tests.unit.engine.speculation.drafted_run import DraftedRun, assert_same_answers, random_requests, reference
from tests.unit.engine.speculation.fake_draft_model import DRAFT_COSTS
from tests.unit.worker.virtual_loop import virtual

NUM_REQUESTS, NUM_SEEDS = 20, sized(1, 25)


def new_device() -> EmulatedExecutor:
    layout = builders.layout()
    return EmulatedExecutor(
        layout=layout,
        kv=np.full((64, layout.block_bytes), 0xEE, dtype=np.uint8),
        vocab_size=VOCAB_SIZE,
        step_seconds=lambda plan: 0.0,
        eos_token_ids=(EOS,),
        constraints=new_constraints(),
    )


@virtual
async def test_forced_text_is_verified_in_the_step_after_the_choice_that_forces_it() -> None:
    sampling = {"grammar": 'start: /[ab]/ "0123456789"', "seed": 1}
    device = new_device()
    engine = DraftedRun(device.execute, 64, open_speculation("auto")).engine
    engine.add(sequence_request(1, [5, 6, 7], max_tokens=20, sampling=sampling))
    lengths = []
    while not (plan := engine.plan()).is_empty:
        lengths += [len(output.tokens) for output in engine.apply(plan, await device.execute(plan)).outputs]
    assert lengths[0] == 1
    assert lengths[1] > 5, "drafts in the step after the choice"
    assert sum(lengths) == 12


def new_draft_model() -> DraftModel:
    """Return a draft model that computes what the emulated model does, but knows no grammars."""
    return DraftModel(
        new_device(),
        BlockPool(64, BLOCK_SIZE_TOKENS, FakeGenerationTable(64)),
        vocab_size=VOCAB_SIZE,
        max_model_len=60,
        eos_token_ids=(EOS,),
        costs=lambda: DRAFT_COSTS,
        clock=lambda: 0.0,
    )


@virtual
async def test_answers_with_a_draft_model_equal_those_without() -> None:
    num_drafts = num_accepted = 0
    for seed in range(sized(1, 25)):
        rng, device, model = Random(seed), new_device(), new_draft_model()
        requests = random_requests(rng, NUM_REQUESTS)
        expected = await reference(device.execute, requests)
        run = await assert_same_answers("model", device.execute, requests, expected, rng, tolerance=0.0, model=model)
        assert model.costs is not None, "a step of the draft model failed"
        num_drafts += run.engine.counters.draft_tokens
        num_accepted += run.engine.counters.accepted_draft_tokens
    assert num_accepted > 5, "those of sequences without rules are right"
    assert num_drafts > num_accepted, "those of the others mostly wrong"


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "auto"])
@virtual
async def test_answers_with_drafts_equal_those_without(kind: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        rng, device = Random(seed), new_device()
        requests = random_requests(rng, NUM_REQUESTS)
        expected = await reference(device.execute, requests)
        run = await assert_same_answers(kind, device.execute, requests, expected, rng, tolerance=0.0)
        counters = run.engine.counters
        happened.update(
            steps=run.num_steps,
            drafts=counters.draft_tokens,
            accepted=counters.accepted_draft_tokens,
            preemptions=counters.preemptions,
            cancelled=len(run.cancelled),
        )
    assert happened["accepted" if kind != "wrong" else "drafts"] > sized(2, 110), happened
    assert happened["steps"] > sized(25, 800), happened
    assert all(happened[what] for what in sized(("steps",), ("preemptions", "cancelled"))), happened


@virtual
async def test_answers_are_equal_with_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts then go on while they are right."""
    monkeypatch.setattr(sequence_drafts, "MANY_SEQUENCES", 1)
    monkeypatch.setattr(sequence_drafts, "MIN_LEFT_TOKENS", 1)
    for seed in range(sized(1, 20)):
        rng, device = Random(1_000 + seed), new_device()
        requests = random_requests(rng, NUM_REQUESTS)
        expected = await reference(device.execute, requests)
        await assert_same_answers("auto", device.execute, requests, expected, rng, tolerance=0.0)
