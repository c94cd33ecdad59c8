"""Random worlds with drafts on the fake device: answers by definition, and exact accounts of blocks."""

from collections import Counter
from random import Random

import pytest

from baton.engine.speculation import sequence_drafts
from baton.engine.state.sequence import EngineSequence, num_blocks_needed
from baton.engine.state.step import SampledToken, SampleRequest, StepSequence
from tests.fake_executor import FakeExecutor
from tests.scale import sized
from tests.unit.engine.speculation.reference_drafter import SHARE_OF_RIGHT, EagerSpeculation, ReferenceDrafter
from tests.unit.engine.test_engine_property import World

NUM_WORLDS = sized(10, 70)
"""For each drafter. A world has about 80 steps."""


class CuttingExecutor(FakeExecutor):
    """Sometimes returns fewer tokens than were right, as if masks were not ready, or defers a sequence."""

    rng = Random(0)

    def _sample(self, part: StepSequence, sample: SampleRequest) -> tuple[SampledToken, ...]:
        tokens = super()._sample(part, sample)
        return tokens[: self.rng.randint(1, len(tokens))] if sample.drafts and self.rng.random() < 0.1 else tokens


class DraftingWorld(World):
    """A world whose engine verifies drafts of one kind."""

    def __init__(self, seed: int, kind: str) -> None:
        rng = Random(seed)
        drafter = ReferenceDrafter(kind, rng, self.find, self.answer_of, vocab_size=50)
        self.drafting = EagerSpeculation(drafter, rng)
        super().__init__(seed, speculation=self.drafting, executor_type=CuttingExecutor)
        self.rig.executor.deferring = lambda _: rng.random() < 0.05

    def find(self, key: int) -> EngineSequence | None:
        return next((seq for seq in self.rig.engine._sequences.all_by_request() if seq.key == key), None)

    def answer_of(self, seq: EngineSequence) -> list[int]:
        request = self.requests.get(seq.seq_id)
        (sample,) = seq.sample_indices
        if request is None:  # it ended in the step in which it came
            return []
        replayed = list(request.token_ids[request.num_prompt_tokens :])
        return replayed + self.rig.expected(request, sample)[0]

    def step(self) -> bool:
        has_run = super().step()
        for seq in self.rig.engine._sequences.running.values():
            unused = seq.num_blocks - num_blocks_needed(seq, self.rig.config.block_size_tokens)
            assert unused <= 1, f"{seq} keeps blocks of rejected drafts"
        live = {seq.key for seq in self.rig.engine._sequences.all_by_request()}
        assert self.drafting.drafter.known <= live
        return has_run


def live_through(seed: int, kind: str) -> Counter[str]:
    """Let a world live and end, check everything, and return what has happened."""
    world = DraftingWorld(seed, kind)
    world.live_through(60)
    world.come_to_an_end(max_steps=3000)
    world.audit()
    world.assert_right()
    world.rig.assert_clean()
    assert not world.drafting.drafter.known
    counters = world.rig.engine.counters
    world.happened.update(
        drafts=counters.draft_tokens,
        accepted=counters.accepted_draft_tokens,
        preemptions=counters.preemptions,
        copies=counters.block_copies,
    )
    return world.happened


@pytest.mark.parametrize("kind", SHARE_OF_RIGHT)
def test_answers_and_blocks_are_right_whatever_is_drafted(kind: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        happened.update(live_through(seed, kind))
    seen = [
        "steps",
        "steps ahead",
        "withdrawn",
        "preemptions",
        "copies",
        "pulls",
        "replays",
        "cancel RUNNING",
        "drafts",
    ]
    assert all(happened[what] for what in seen), happened
    share = happened["accepted"] / happened["drafts"]
    assert {"right": share > 0.6, "wrong": share < 0.02, "random": 0.1 < share < 0.6}[kind], share
    assert happened["steps"] >= sized(250, 3_400)


@pytest.mark.parametrize("kind", ["random", "right"])
def test_drafts_that_go_on_change_nothing_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many sequences a draft that was right is kept, and drafters are asked less often."""
    monkeypatch.setattr(sequence_drafts, "MANY_SEQUENCES", 1)
    monkeypatch.setattr(sequence_drafts, "MIN_LEFT_TOKENS", 1)
    happened: Counter[str] = Counter()
    for seed in range(100, 100 + sized(4, 40)):
        happened.update(live_through(seed, kind))
    assert happened["accepted"] > 20
