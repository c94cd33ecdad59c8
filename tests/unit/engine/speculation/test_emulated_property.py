"""Answers with drafts equal those without on the emulated device, which detects every wrong KV slot."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from baton.engine.executors.emulated import EmulatedExecutor
from baton.engine.speculation import sequence_drafts
from baton.engine.speculation.modes import open_speculation
from tests import builders
from tests.builders import sequence_request
from tests.scale import sized
from tests.unit.engine.speculation.byte_grammars import EOS, VOCAB_SIZE, new_constraints
from tests.unit.engine.speculation.drafted_run import DraftedRun, assert_same_answers, random_requests, reference
from tests.unit.worker.virtual_loop import virtual

NUM_REQUESTS, NUM_SEEDS = 20, sized(1, 45)


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
    assert happened["accepted" if kind != "wrong" else "drafts"] > sized(2, 200), happened
    assert happened["steps"] > sized(25, 1_500), happened
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
