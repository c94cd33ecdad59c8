"""Recent decisions are remembered with their records and outcomes, in bounded memory."""

from dataclasses import replace

from baton.core.ids import DecisionId
from baton.core.request import LegTimeline, RequestActuals
from baton.runtime.process.byte_budget import Account, ByteBudget
from baton.scheduler.decisions.recent_decisions import MAX_UNPACKED, MAX_UNRECORDED, RecentDecisions
from baton.scheduler.scheduler_budget import scheduler_budget
from tests.builders import query
from tests.unit.scheduler.decided import decide, many


def test_record_is_built_on_demand_and_keeps_the_outcome() -> None:
    recent, decided = RecentDecisions(scheduler_budget(2**30)), decide(query(request_id=b"r"), many(2))
    recent.add(decided)
    (record,) = recent.of_request(b"r")
    assert record.candidates
    assert record.inputs
    assert recent.finish(RequestActuals(decision_id=decided.decision_id, outcome="stop", ttft_s=0.5))
    (done,) = recent.of_request(None)
    assert done.actuals["ttft_s"] == 0.5
    assert done.inputs == record.inputs
    assert recent.record_of(decided.decision_id) == done
    assert not recent.finish(RequestActuals(decision_id=DecisionId("unknown"), outcome="stop"))


def test_oldest_unrecorded_decisions_keep_only_their_answers() -> None:
    recent = RecentDecisions(scheduler_budget(2**30))
    for number in range(MAX_UNRECORDED + 5):
        recent.add(decide(query(request_id=b"%d" % number), many(2), decision_id=f"{number:x}"))
    (old,) = recent.of_request(b"0")
    assert old.placement is not None
    assert (old.candidates, old.inputs) == ((), "")
    (new,) = recent.of_request(b"5")
    assert new.inputs


def test_recent_decisions_forget_the_oldest_when_their_memory_is_used_up() -> None:
    budget = ByteBudget({Account.RECORDS: 100_000})
    recent = RecentDecisions(budget)
    for number in range(200):
        recent.add(decide(query(request_id=b"%d" % number), many(2), decision_id=f"{number:x}"))
        assert recent.record_of(DecisionId(f"{number:x}")) is not None
        assert budget.used(Account.RECORDS) <= 100_000
    assert recent.of_request(b"0") == ()
    assert recent.of_request(b"199")
    assert not recent.finish(RequestActuals(decision_id=DecisionId("0"), outcome="stop"))


def test_decision_larger_than_the_memory_of_all_is_forgotten_alone() -> None:
    budget = ByteBudget({Account.RECORDS: 100_000})
    recent = RecentDecisions(budget)
    for number in range(3):
        recent.add(decide(query(request_id=b"%d" % number), many(2), decision_id=f"{number:x}"))
    used = budget.used(Account.RECORDS)
    recent.add(decide(query(request_id=b"large", block_hashes=(b"h" * 16,) * 10_000), many(2), decision_id="f"))
    assert recent.of_request(b"large") == ()
    assert budget.used(Account.RECORDS) == used
    assert all(recent.of_request(b"%d" % number) for number in range(3))


def test_compressed_record_is_the_same_and_gets_its_outcome() -> None:
    recent = RecentDecisions(scheduler_budget(2**30))
    decisions = [
        decide(query(request_id=b"%d" % number, block_hashes=(b"h" * 16,)), many(3), decision_id=f"{number:x}")
        for number in range(MAX_UNPACKED + 1)
    ]
    for decision in decisions:
        recent.add(decision)
        assert recent.record_of(decision.decision_id) == decision.to_record()
    packed = decisions[0]
    assert recent.record_of(packed.decision_id) == packed.to_record()
    actuals = RequestActuals(
        decision_id=packed.decision_id, outcome="finished", ttft_s=0.5, legs=(LegTimeline(worker_id="p0", pid=1),)
    )
    assert recent.finish(actuals)
    (done,) = recent.of_request(b"0")
    assert replace(done, actuals={}) == packed.to_record()
    assert done.actuals["ttft_s"] == 0.5


def test_memory_of_decisions_is_similar_with_records_and_with_answers_only() -> None:
    """A scheduler builds all records while it is slow, and few while it is fast."""
    used, decided = [], decide(query(request_id=b"r"), many(2))
    for builds_all in (True, False):
        budget = scheduler_budget(2**30)
        recent = RecentDecisions(budget)
        for number in range(4 * MAX_UNPACKED):
            decision = replace(decided, decision_id=DecisionId(f"{number:x}"))
            recent.add(decision)
            if builds_all:
                recent.record_of(decision.decision_id)
        used.append(budget.used(Account.RECORDS))
    assert used[0] <= 1.5 * used[1]
