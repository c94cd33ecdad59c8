"""Random worlds with a draft model: answers by definition, right KV in both models, and no block leaks."""

from collections import Counter
from random import Random

import pytest

from baton.core.request import Sampling
from tests.scale import sized
from tests.unit.engine.speculation.fake_draft_model import EagerRounds, draft_model, run_round
from tests.unit.engine.speculation.reference_drafter import SHARE_OF_RIGHT
from tests.unit.engine.test_engine_property import EOS, World

NUM_WORLDS = sized(5, 40)
"""For each kind of draft model. A world has about 80 steps."""


class ModelWorld(World):
    """A world whose engine verifies drafts of a model, in a small draft pool and with failing steps."""

    def __init__(self, seed: int, kind: str) -> None:
        rng = Random(seed)
        model, self.device = draft_model(
            kind, num_blocks=rng.choice((8, 20, 60)), rng=rng, eos=EOS, max_model_len=rng.choice((20, 60, 1000))
        )
        if rng.random() < 0.3:
            self.device.raising = {rng.randint(2, 30), rng.randint(2, 30)}
        if rng.random() < 0.3:
            self.device.failing = self.maybe_fail
        self.drafting = EagerRounds(model, rng)
        super().__init__(seed, speculation=self.drafting)
        self.rig.executor.deferring = lambda _: rng.random() < 0.05

    def step(self) -> bool:
        drafts = run_round(self.rig.engine, even_with_prompts=True)
        self.rig.engine.check()
        self.happened["rounds with drafts"] += bool(drafts)
        return super().step()


def live_through(seed: int, kind: str) -> Counter[str]:
    """Let a world live and end, check everything, and return what has happened."""
    world = ModelWorld(seed, kind)
    world.live_through(60)
    world.come_to_an_end(max_steps=3000)
    world.audit()
    world.assert_right()
    world.rig.assert_clean()
    assert not world.device.wrong
    counts = world.device.pool.counts()
    assert counts.free + counts.cached == counts.total, f"draft blocks leak: {counts}"
    counters = world.rig.engine.counters
    world.happened.update(
        drafts=counters.draft_tokens,
        accepted=counters.accepted_draft_tokens,
        preemptions=counters.preemptions,
        copies=counters.block_copies,
        pieces=world.drafting.num_pieces,
        shared_prefixes=counts.cached,
    )
    return world.happened


@pytest.mark.parametrize("kind", SHARE_OF_RIGHT)
def test_answers_and_blocks_are_right_whatever_the_model_drafts(kind: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        happened.update(live_through(seed, kind))
    seen = ["rounds with drafts", "drafts", "pieces", "pulls", "shared_prefixes"]
    seen += sized([], ["preemptions", "steps ahead", "copies", "replays", "cancel RUNNING"])
    assert all(happened[what] for what in seen), happened
    share = happened["accepted"] / happened["drafts"]
    assert {"right": share > 0.6, "wrong": share < 0.02, "random": 0.1 < share < 0.7}[kind], share
    assert happened["steps"] >= sized(120, 1_600)


def test_sampling_of_the_draft_model_has_no_rules() -> None:
    """Grammars and word lists need matchers, which only the verifying model has."""
    from baton.engine.speculation.draft_model import _without_rules

    plain = Sampling(max_tokens=3, seed=5, repetition_penalty=1.2)
    assert _without_rules(plain) is plain
    ruled = Sampling(max_tokens=3, seed=5, grammar="x", bad_words=((1,),), allowed_token_ids=(2,), num_logprobs=1)
    assert _without_rules(ruled) == Sampling(max_tokens=3, seed=5)
