"""Acceptance, the choice of drafts, and asynchronous scheduling with drafts."""

import pytest

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation import sequence_drafts
from baton.engine.speculation.acceptance import AcceptanceRate, AcceptanceRates
from baton.engine.speculation.drafter import Draft
from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.speculation.modes import finds_forced_tokens, open_speculation
from baton.engine.speculation.sequence_drafts import SequenceDrafts
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.outcome import DraftCounts, EngineCounters
from baton.engine.state.sequence import EngineSequence
from tests.builders import sequence_request
from tests.engine_rig import EngineRig
from tests.unit.engine.loop_helpers import make_loop, running
from tests.unit.worker.virtual_loop import virtual

COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-4, decode_context_s=0, draft_token_s=1e-4
)


class Scripted:
    """Drafts what it is told to."""

    name = "scripted"
    learns = False

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.num_observed = 0

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        self.num_observed += num_new

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        return Draft(self.tokens) if self.tokens else None

    def forget(self, key: int) -> None:
        """Keep nothing."""


class OtherScripted(Scripted):
    name = "other"


def decoding(*outputs: int, max_tokens: int = 50, **changes: object) -> EngineSequence:
    """Return a sequence with these outputs, of which all but the last are computed."""
    seq = EngineSequence(sequence_request(1, [5, 6, 7], max_tokens=max_tokens, **changes), key=1, arrival=1)
    for token in outputs:
        seq.append(token)
    seq.num_computed_tokens = len(seq.token_ids) - 1
    return seq


def chosen(
    speculation: Speculation, seq: EngineSequence, costs: StepCostModel | None = COSTS, **limits: int
) -> tuple[int, ...]:
    work = StepWork.of((), [seq.num_computed_tokens])
    found = speculation.choose([seq], work, costs, **{"max_drafts": 64, "max_model_len": 1000} | limits)
    return found.get(seq.key, ())


def test_acceptance_is_measured_without_verifying() -> None:
    drafter = Scripted(1, 2, 3)
    speculation = Speculation([drafter])
    seq = decoding(9, max_tokens=100)
    speculation.observe(seq, 1, ())
    assert chosen(speculation, seq) == (1, 2, 3), "unknown acceptance, cheap drafts"
    for _ in range(60):
        seq.append(8)
        speculation.observe(seq, 1, ())
    assert chosen(speculation, seq) == ()
    for _ in range(10):
        seq.append(1)
        speculation.observe(seq, 1, ())
    assert chosen(speculation, seq)
    assert drafter.num_observed == 71


def test_verified_drafts_are_counted_for_the_drafter_that_made_them() -> None:
    speculation = Speculation([Scripted(1, 2, 3), OtherScripted(4, 5, 6)])
    seq = decoding(9, max_tokens=100)
    speculation.observe(seq, 1, ())
    for tokens, name in (((1, 2, 3), "scripted"), ((4, 5, 6), "other")):
        for _ in range(30):
            seq.append(tokens[0])
            speculation.observe(seq, 1, ())
        assert chosen(speculation, seq) == tokens
        assert speculation.drafter_of(seq.key) == name
    counters = EngineCounters()
    for name, num_drafts, num_accepted in (("ngram", 5, 3), ("model", 2, 0), ("ngram", 4, 4)):
        counters.drafts_verified(name, num_drafts, num_accepted)
    assert counters.drafts == {"ngram": DraftCounts(9, 7), "model": DraftCounts(2, 0)}
    assert (counters.draft_tokens, counters.accepted_draft_tokens) == (11, 7)


def test_new_sequence_starts_with_the_acceptance_of_others() -> None:
    speculation = Speculation([Scripted(1, 2, 3)])
    for key in range(40):
        other = decoding(9)
        other.key = 100 + key
        for _ in range(10):
            speculation.observe(other, 1, ())
            other.append(8)
        speculation.forget(other.key)
    seq = decoding(9)
    speculation.observe(seq, 1, ())
    assert chosen(speculation, seq) == ()
    speculation.check([1])


def test_rates_follow_recent_drafts_and_begin_with_the_prior() -> None:
    rate = AcceptanceRate(memory=20)
    assert rate.rate(0.3) == pytest.approx(0.3)
    for _ in range(200):
        rate.count(1, is_wrong=False)
    assert rate.rate(0.3) > 0.85
    worker = AcceptanceRates(500)
    own = AcceptanceRates(20, worker)
    for _ in range(20):
        own.count(("a", 1), 0, is_wrong=True)
    assert own.rate(("a", 1)) < worker.rate(("a", 1)) < 0.2
    assert own.rate(("a", 2)) == worker.rate(("a", 2)) == 0.5


def test_unknown_costs_allow_drafts_only_if_they_are_not_needed() -> None:
    for needs_costs in (True, False):
        speculation = Speculation([Scripted(1, 2, 3)], needs_costs=needs_costs)
        seq = decoding(9)
        speculation.observe(seq, 1, ())
        assert bool(chosen(speculation, seq, None)) is not needs_costs


@pytest.mark.parametrize(
    ("limits", "seq", "count"),
    [
        ({"max_drafts": 2}, decoding(9), 2),
        ({"max_drafts": 0}, decoding(9), 0),
        ({}, decoding(9, 9, max_tokens=4), 1),
        ({}, decoding(9, 9, 9, max_tokens=4), 0),
        ({"max_model_len": 7}, decoding(9), 2),
    ],
)
def test_drafts_keep_to_all_limits(limits: dict[str, int], seq: EngineSequence, count: int) -> None:
    """At most as many as steps, and as the tokens that are left but one: the last is never computed."""
    speculation = Speculation([Scripted(1, 2, 3)])
    speculation.observe(seq, 1, ())
    assert len(chosen(speculation, seq, COSTS, **limits)) == count


def test_drafts_stop_before_tokens_that_end_the_response() -> None:
    for eos, sampling, expected in (
        ((3,), {}, (1, 2)),
        ((1,), {}, ()),
        ((1,), {"ignore_eos": True, "stop_token_ids": (2,)}, (1,)),
    ):
        speculation = Speculation([Scripted(1, 2, 3)])
        seq = decoding(9, sampling=sampling)
        speculation.observe(seq, 1, eos)
        assert chosen(speculation, seq) == expected


def test_draft_with_the_most_expected_tokens_is_taken() -> None:
    speculation = Speculation([Scripted(1, 2, 3), OtherScripted(4, 5)])
    seq = decoding(9)
    for _ in range(20):
        speculation.observe(seq, 1, ())
        seq.append(4)
    speculation.observe(seq, 1, ())
    assert chosen(speculation, seq) == (4, 5)


def one_of_many(speculation: Speculation, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineSequence, SequenceDrafts]:
    """Return an observed sequence and its drafts. More sequences decode than are asked at each token."""
    monkeypatch.setattr(sequence_drafts, "MANY_SEQUENCES", 1)
    other = decoding(9)
    other.key = 2
    speculation.observe(other, 1, ())
    seq = decoding(9, max_tokens=100)
    speculation.observe(seq, 1, ())
    return seq, speculation._sequences[seq.key]


def test_wrong_draft_of_a_drafter_that_is_not_asked_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first drafter's new draft is long enough, so the second, whose draft was wrong, is not asked."""
    first, second = Scripted(), OtherScripted(*range(10, 25))
    speculation = Speculation([first, second])
    seq, own = one_of_many(speculation, monkeypatch)
    for token in range(10, 20):
        seq.append(token)
        speculation.observe(seq, 1, ())
    assert own.best is own.slots[1]
    assert own.best_rate > 0.8
    first.tokens, own.slots[0].ask_at = tuple(range(50, 65)), 0
    seq.append(7)
    speculation.observe(seq, 1, ())
    assert own.best_tokens == first.tokens
    assert not own.slots[1].tokens
    assert own.rates.rate(own.slots[1].kind) < 0.9


def test_forced_tokens_are_taken_at_once_by_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a long text in which nothing was forced."""
    forced = ForcedDrafter()
    speculation = Speculation([forced], forced=forced)
    seq, own = one_of_many(speculation, monkeypatch)
    while own.slots[0].ask_at <= len(seq.token_ids) + 1:
        seq.append(8)
        speculation.observe(seq, 1, ())
    speculation.offer_forced(seq.key, len(seq.token_ids) + 1, (5, 6, 7))
    seq.append(8)
    speculation.observe(seq, 1, ())
    assert own.best_tokens == (5, 6, 7)


def test_modes() -> None:
    assert open_speculation("off") is None
    assert (open_speculation("ngram"), open_speculation("auto")) != (None, None)
    assert [finds_forced_tokens(mode) for mode in ("off", "ngram", "auto", "draft:x")] == [False, False, True, True]


class Perfect(Scripted):
    """Drafts the right answer of one request."""

    def __init__(self, rig: EngineRig) -> None:
        super().__init__()
        self.rig = rig
        self.answer: list[int] = []

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        rest = self.answer[len(token_ids) - 6 :][:15]
        return Draft(tuple(rest)) if rest else None


@pytest.mark.parametrize(("is_right", "least_ahead", "most_ahead"), [(True, 0, 8), (False, 30, 60)])
@virtual
async def test_steps_are_planned_ahead_only_while_drafts_save_less(
    is_right: bool, least_ahead: int, most_ahead: int
) -> None:
    """On this device planning ahead saves nothing, so useful drafts stop it. Useless ones do not."""
    rig = EngineRig()
    drafter = Perfect(rig)
    rig = EngineRig(step_costs=lambda: COSTS, speculation=Speculation([drafter]))
    request = sequence_request(1, range(6), max_tokens=60, sampling={"ignore_eos": True})
    answer = rig.expected(request, 0)[0]
    drafter.answer = answer if is_right else [token + 1 for token in answer]
    loop = make_loop(rig)
    async with running(loop):
        loop.add(request)
    rig.assert_answered(request)
    rig.assert_clean()
    assert least_ahead <= rig.executor.num_ahead <= most_ahead
    counters = rig.engine.counters
    assert list(counters.drafts) == [drafter.name]
    if is_right:
        assert counters.steps < 20
        assert counters.accepted_draft_tokens == counters.draft_tokens > 40
    else:
        assert counters.accepted_draft_tokens == 0
        assert counters.draft_tokens < 30


def test_only_final_tokens_are_published() -> None:
    """A block that rejected drafts have filled has no hash, and later requests find only final ones."""
    rig = EngineRig(step_costs=lambda: COSTS, speculation=Speculation([Scripted(1, 2, 3, 4, 5, 6, 7)]))
    request = rig.add(sequence_request(1, range(6), max_tokens=20, sampling={"ignore_eos": True}))
    rig.step()
    plan = rig.plan()
    assert plan.sequences[0].num_drafts >= 4
    before = set(rig.pool.hashes())
    rig.apply(plan)
    assert set(rig.pool.hashes()) == before
    rig.run()
    rig.assert_answered(request)
    tokens = [*range(6), *rig.outputs[1, 0]]
    again = rig.add(sequence_request(2, tokens, max_tokens=3, sampling={"ignore_eos": True}))
    rig.run()
    assert rig.admissions[2].num_cached_blocks == (6 + 20 - 1) // 4
    rig.assert_answered(request, again)
    rig.assert_clean()


def test_drafts_preempt_no_sequence() -> None:
    """With few blocks left there are fewer drafts, or none."""
    rig = EngineRig(num_blocks=5, step_costs=lambda: COSTS, speculation=Speculation([Scripted(*range(1, 15))]))
    requests = [
        rig.add(sequence_request(i, [10 * i + j for j in range(6)], max_tokens=3, sampling={"ignore_eos": True}))
        for i in (1, 2)
    ]
    rig.run()
    rig.assert_answered(*requests)
    assert rig.engine.counters.preemptions == 0
    rig.assert_clean()
