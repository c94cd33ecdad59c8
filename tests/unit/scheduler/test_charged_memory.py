"""The memory budget charges at least what decisions and placements take, as tracemalloc measures it."""

import gc
import tracemalloc
from collections import OrderedDict
from dataclasses import replace

import pytest

from baton.core.cluster.decision_record import MissingPrefix, MissingReason, SessionTurn
from baton.core.cluster.placement import Placement
from baton.core.ids import DecisionId
from baton.core.request import LegTimeline, RequestActuals, Slo
from baton.runtime.process.byte_budget import Account
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.decisions.recent_decisions import MAX_UNPACKED, RecentDecisions
from baton.scheduler.policies import POLICIES
from baton.scheduler.scheduler_budget import PLACEMENT_BYTES, scheduler_budget
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.open_placements import OpenPlacement
from baton.scheduler.state.session_table import session_of_query
from tests.builders import query
from tests.scale import sized
from tests.unit.scheduler.measured_workers import decoding, fast_link, measured, queued

pytestmark = pytest.mark.slow

NUM_DECISIONS = 60
FORGET_S = 1e9
each_size = pytest.mark.parametrize("num_workers", sized([2, 32], [2, 16, 128]))
each_policy = pytest.mark.parametrize("policy", ["kv_centric", "least_loaded"])


def cluster_of(num_workers: int) -> ClusterState:
    """A state with half prefill and half decode workers, each of which has links to all others."""
    state = ClusterState(silence_s=FORGET_S, reservation_s=FORGET_S)
    links = tuple(fast_link(f"p{i:03}") for i in range(num_workers // 2))
    for i in range(num_workers // 2):
        state.update(measured(f"p{i:03}", "prefill", **queued(10 * i)), 0.0)
        state.update(measured(f"d{i:03}", "decode", **decoding(1), links=links), 0.0)
    return state


def decided(state: ClusterState, policy: str, number: int) -> UnrecordedDecision:
    """Place one request as the scheduler does, with all that its record may contain."""
    asking = query(
        request_id=b"r%d" % number,
        num_prompt_tokens=1000,
        slo=Slo(ttft_s=5.0 + number, tpot_s=0.01 + number),
        session_key=f"session-{number:032}",
        block_hashes=tuple(b"%8d%8d" % (number, block) for block in range(64)),
    )
    rules, cluster = DecisionRules(decision_number=number), state.snapshot(0.0)
    decision_id = DecisionId(f"{number:016x}")
    result = decide(decision_id, "s", policy, POLICIES[policy], asking, cluster, rules)
    assert isinstance(result.answer, Placement)
    state.reserve(decision_id, asking, result.answer, 0.0)
    return UnrecordedDecision(
        decision_id=decision_id,
        scheduler_id="s",
        policy=policy,
        query=asking,
        answer=result.answer,
        choice=result.choice,
        cluster=cluster,
        rules=rules,
        missing=MissingPrefix(
            num_blocks=1000 + number,
            reason=MissingReason.EVICTED,
            worker_id=cluster.workers[0].worker_id,
            known_blocks=300 + number,
            ago_s=number / 3,
        ),
        session=SessionTurn(turn=300 + number, gap_s=number / 7, median_gap_s=number / 11),
    )


def traced_now() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@each_policy
@each_size
def test_charge_of_unrecorded_decisions_covers_their_memory(num_workers: int, policy: str) -> None:
    state, budget = cluster_of(num_workers), scheduler_budget(2**30)
    decided(state, policy, 0)

    tracemalloc.start()
    try:
        recent = RecentDecisions(budget)
        for number in range(1, NUM_DECISIONS + 1):
            recent.add(decided(state, policy, number))
        charged, taken = budget.used(Account.RECORDS), traced_now()
        del recent
        taken -= traced_now()
    finally:
        tracemalloc.stop()
    assert taken <= charged <= 2 * taken


def finished(decision_id: DecisionId) -> RequestActuals:
    """The outcome of a request with two legs, as it is read from a message."""
    legs = tuple(LegTimeline(worker_id=f"w{i}", pid=70_000 + i, queue_s=i + 0.25, decode_s=i + 0.5) for i in range(2))
    return RequestActuals(decision_id=decision_id, outcome="finished", ttft_s=len(decision_id) / 7, legs=legs)


@each_size
def test_charge_of_compressed_records_covers_their_memory(num_workers: int) -> None:
    state = cluster_of(num_workers)
    different = [decided(state, "kv_centric", number) for number in range(NUM_DECISIONS)]
    decisions = [
        replace(different[number % NUM_DECISIONS], decision_id=DecisionId(f"{number:016x}"))
        for number in range(MAX_UNPACKED + NUM_DECISIONS)
    ]

    budget, charged, traced = scheduler_budget(2**30), [], []
    tracemalloc.start()
    try:
        recent = RecentDecisions(budget)
        for part in (decisions[:MAX_UNPACKED], decisions[MAX_UNPACKED:]):
            for decision in part:
                recent.add(decision)
                recent.record_of(decision.decision_id)
                recent.finish(finished(decision.decision_id))
            charged.append(budget.used(Account.RECORDS))
            traced.append(traced_now())
        del recent
        before = traced_now()
    finally:
        tracemalloc.stop()
    assert traced[0] - before <= charged[0]
    assert traced[1] - traced[0] <= charged[1] - charged[0] <= 2 * (traced[1] - traced[0])


@each_policy
@each_size
def test_charge_of_placements_covers_their_memory(num_workers: int, policy: str) -> None:
    state = cluster_of(num_workers)
    opened: OrderedDict[DecisionId, OpenPlacement] = OrderedDict()
    workers = tuple(report.worker.worker_id for report in state.reports())
    tracemalloc.start()
    try:
        for number in range(NUM_DECISIONS):
            decision = decided(state, policy, number)
            assert isinstance(decision.answer, Placement)
            opened[decision.decision_id] = OpenPlacement(
                decision.answer, decision.query.num_prompt_tokens, session_of_query(decision.query)
            )
        del decision
        state.snapshot(0.0)
        taken = traced_now()
        while opened:
            state.release(opened.popitem()[0], workers)
        state.snapshot(0.0)
        taken -= traced_now()
    finally:
        tracemalloc.stop()
    assert PLACEMENT_BYTES / 3 <= taken / NUM_DECISIONS <= PLACEMENT_BYTES
