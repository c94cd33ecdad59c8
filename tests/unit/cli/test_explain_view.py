"""`baton explain` as text: each attempt with its placement or refusal, candidates and actual values."""

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from baton.cli.admin.explain_view import policy_rules, render_decisions
from baton.cli.main import cli
from baton.core.cluster.decision_record import Candidate, DecisionRecord, MissingPrefix, MissingReason, SessionTurn
from baton.core.cluster.decision_terms import TERMS
from baton.core.cluster.placement import Rejection
from baton.core.errors import Reason
from baton.core.messages.jobs import PrefixSource
from baton.core.request import Slo
from baton.scheduler.policies import POLICIES
from tests.builders import decision_record, placement, query, worker_ref
from tests.unit.cli.screen import printed, row
from tests.unit.scheduler.measured_workers import fast_link, measured, queued, seen
from tests.unit.scheduler.policy_cases import busy, chosen

RULES = {"least_loaded": "The worker with the least load."}
ACTUALS: dict[str, Any] = {
    "outcome": "stop",
    "ttft_s": 0.031,
    "tpot_s": 0.0029,
    "num_output_tokens": 13,
    "num_cached_tokens": 16,
    "legs": [
        {
            "worker_id": "w0",
            "pid": 4711.0,
            "queue_s": 0.0004,
            "compute_s": 0.028,
            "num_computed_tokens": 8,
            "num_cached_tokens": 16,
        },
        {
            "worker_id": "w1",
            "pid": 4718,
            "kv_bytes": 49_152,
            "kv_transfer_s": 0.002,
            "kv_exposed_s": 0.0006,
            "kv_wait_s": 0.03,
            "transport": "cma",
            "decode_s": 0.035,
        },
    ],
}


def shown(*records: DecisionRecord, is_verbose: bool = True) -> str:
    return printed(render_decisions(records, RULES if is_verbose else {}, is_verbose=is_verbose))


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (
            MissingPrefix(num_blocks=16, reason=MissingReason.EVICTED, worker_id="w2", known_blocks=12, ago_s=6.0),
            "16 full blocks of the prompt: w2 evicted at least 12 of them 6 s before",
        ),
        (
            MissingPrefix(num_blocks=4, reason=MissingReason.HELD_ELSEWHERE, worker_id="w2", known_blocks=3),
            "4 full blocks of the prompt: w2 holds 3 of them, but pulling them was predicted to take longer",
        ),
        (
            MissingPrefix(num_blocks=1_200, reason=MissingReason.NEVER_SEEN),
            "1,200 full blocks of the prompt: never seen",
        ),
    ],
)
def test_missing_prefix_is_explained(missing: MissingPrefix, said: str) -> None:
    assert said in " ".join(shown(decision_record(missing=missing)).split())
    assert "full blocks of the prompt" not in shown(decision_record())


def test_turn_of_a_session_is_shown_with_its_gap() -> None:
    record = decision_record(
        query=query(session_key="agent-7"), session=SessionTurn(turn=3, gap_s=5.25, median_gap_s=4.0, attained_s=2.5)
    )
    assert (
        "session agent-7, turn 3, 5.25 s after the turn before (median 4 s); 2.5 s computed for it so far"
        in " ".join(shown(record).split())
    )
    assert "session" not in shown(decision_record())


@pytest.mark.parametrize("reason", MissingReason)
def test_every_reason_has_a_sentence(reason: MissingReason) -> None:
    assert "5 full blocks" in shown(decision_record(missing=MissingPrefix(num_blocks=5, reason=reason)))


def test_placement_shows_workers_policy_and_rule() -> None:
    lines = shown(decision_record()).splitlines()
    assert lines[0] == "still running, or its gateway is gone"
    assert lines[1] == f"request {b'request-0'.hex()}"
    assert lines[3] == "attempt 1: prefill w0, decode w1"
    assert lines[4] == "  request    40 tokens to prefill, at most 16 to generate"
    assert lines[5] == "  policy     least_loaded, at s0: The worker with the least load."
    assert "  policy     least_loaded, at s0\n" in shown(decision_record(), is_verbose=False) + "\n"


def test_unknown_policy_is_shown_without_a_rule() -> None:
    assert "  policy     oracle, at s0\n" in shown(decision_record(policy="oracle")) + "\n"


def test_placement_with_one_worker_describes_its_role() -> None:
    assert "prefill and decode w1, without KV transfer" in shown(decision_record(placement=placement(prefill=None)))
    assert "prefill w0, without decode because one token is requested" in shown(
        decision_record(placement=placement(decode=None))
    )


def test_pulled_prefix_shows_blocks_and_source_worker() -> None:
    source = PrefixSource(worker=worker_ref("w7"), num_blocks=3)
    assert "prefix of 3 blocks from w7\n" in shown(decision_record(placement=placement(prefix_source=source)))
    of_host = placement(prefill=None, prefix_source=replace(source, num_host_blocks=2))
    assert "without KV transfer, prefix of 3 blocks from w7 (2 of them in host memory)" in shown(
        decision_record(placement=of_host)
    )
    of_disk = placement(prefix_source=replace(source, num_host_blocks=1, num_disk_blocks=2))
    assert "from w7 (1 of them in host memory, 2 of them on its disk)" in shown(decision_record(placement=of_disk))


def test_candidates_show_their_terms_and_chosen_ones_are_marked() -> None:
    candidates = (
        Candidate(worker=worker_ref("w0"), side="prefill", terms={"queued_prefill_tokens": 1200, "queue_s": 0.0004}),
        Candidate(worker=worker_ref("w1"), side="decode", terms={"free_blocks": 8192}),
        Candidate(worker=worker_ref("w2"), side="decode", terms={"free_blocks": 10}),
    )
    screen = shown(decision_record(candidates=candidates, num_excluded={"draining": 2, "serves other": 1}))
    assert row(screen, "candidate") == ["candidate", "for", "queue", "queued", "tokens", "free", "blocks"]
    assert row(screen, "w0") == ["w0", "prefill", "0.4", "ms", "1,200", "-", "◀", "chosen"]
    assert row(screen, "w1") == ["w1", "decode", "-", "-", "8,192", "◀", "chosen"]
    assert row(screen, "w2") == ["w2", "decode", "-", "-", "10"]
    assert "  excluded   2 draining, 1 serves other" in screen


def test_worker_that_computes_the_prompt_and_decodes_is_chosen_for_both() -> None:
    candidates = tuple(Candidate(worker=worker_ref("w1"), side=side, terms={}) for side in ("prefill", "decode"))
    screen = shown(decision_record(candidates=candidates, placement=placement(prefill=None, decode="w1")))
    assert screen.count("◀ chosen") == 2


def test_seconds_of_a_candidate_are_shown_in_the_order_of_the_request_path() -> None:
    terms = {
        "transfer_s": 0.004,
        "queue_s": 0.02,
        "cost_s": 0.3,
        "ttft_target_s": 3.0,
        "prefill_s": 0.25,
        "prefix_pull_s": 0.026,
        "pulled_blocks": 12.0,
    }
    screen = shown(decision_record(candidates=(Candidate(worker=worker_ref("w0"), side="prefill", terms=terms),)))
    assert (
        row(screen, "candidate") == "candidate for cost queue prefix pull prefill exposed KV TTFT target pulled".split()
    )
    assert row(screen, "w0") == "w0 prefill 300 ms 20 ms 26 ms 250 ms 4 ms 3 s 12 ◀ chosen".split()


def test_terms_that_matter_for_no_candidate_need_verbose() -> None:
    terms = {"cost_s": 0.3, "transfer_s": 0.0, "margin_s": 0.0, "prefix_pull_s": 0.01, "new_thing": 0.0}
    record = decision_record(candidates=(Candidate(worker=worker_ref("w0"), side="prefill", terms=terms),))
    few = row(shown(record, is_verbose=False), "candidate")
    assert few == "candidate for cost prefix pull new thing".split()
    assert row(shown(record), "candidate") == "candidate for cost prefix pull exposed KV margin new thing".split()


def test_prefill_share_is_shown_after_the_tpot() -> None:
    terms = {"recent_prefill_share": 0.412, "tpot_s": 0.0085, "cost_s": 0.009}
    screen = shown(decision_record(candidates=(Candidate(worker=worker_ref("w1"), side="decode", terms=terms),)))
    assert row(screen, "candidate") == "candidate for cost TPOT prefill share".split()
    assert row(screen, "w1") == "w1 decode 9 ms 8.5 ms 0.412 ◀ chosen".split()


def test_predictions_and_actual_values_are_both_shown() -> None:
    screen = shown(decision_record(placement=placement(ttft_s=0.029, tpot_s=0.003, queue_s=0.0), actuals=ACTUALS))
    assert "  predicted  queue 0 ms, TTFT 29 ms, TPOT 3 ms" in screen
    assert "  actual     TTFT 31 ms, TPOT 2.9 ms, 13 tokens, 16 prompt tokens from cache; ended: stop" in screen
    assert "w0 (pid 4711): waited 0.4 ms, computed 8 tokens in 28 ms (16 more from cache)" in screen
    pulled = (
        "pulled 48 KiB over cma in 2 ms (0.6 ms of it after the last chunk), waited 30 ms for it, decoded for 35 ms"
    )
    assert f"w1 (pid 4718): {pulled}" in screen


def test_accepted_draft_tokens_are_shown_with_the_decode_time() -> None:
    leg = {"worker_id": "w1", "pid": 1, "decode_s": 0.035, "num_draft_tokens": 40, "num_accepted_tokens": 31}
    screen = shown(decision_record(actuals={**ACTUALS, "legs": [leg]}))
    assert "w1 (pid 1): decoded for 35 ms (31 of 40 draft tokens accepted)" in screen


def test_preemptions_are_shown_with_the_tokens_that_were_computed_again() -> None:
    leg = {"worker_id": "w1", "pid": 1, "decode_s": 0.035, "num_preemptions": 2, "num_recomputed_tokens": 1234}
    screen = shown(decision_record(actuals={**ACTUALS, "legs": [leg]}))
    assert "w1 (pid 1): decoded for 35 ms, preempted 2 times, computed 1,234 tokens again" in screen


def test_unknown_values_are_omitted() -> None:
    assert "  actual     unknown" in shown(decision_record())
    assert "predicted" not in shown(decision_record())
    partly = shown(decision_record(actuals={"outcome": "worker_lost", "ttft_s": None, "legs": [{"worker_id": "w0"}]}))
    assert "  actual     0 tokens; ended: worker_lost" in partly
    assert "w0 (pid 0): nothing" in partly


def test_refusal_shows_reason_prediction_and_limit() -> None:
    refusal = Rejection(
        reason=Reason.TTFT_SLO, message="too late", retry_after_s=1.0, term="ttft", predicted_s=0.8, limit_s=0.5
    )
    screen = shown(decision_record(placement=None, rejection=refusal))
    assert "attempt 1: refused, ttft_slo: too late (ttft 800 ms, limit 500 ms)" in screen
    assert "actual" not in screen


def test_every_attempt_is_shown_with_its_query() -> None:
    again = query(
        attempt=1,
        num_prompt_tokens=45,
        num_output_tokens=5,
        avoid=(worker_ref("w1"),),
        slo=Slo(ttft_s=0.5),
        priority=-1,
        sample_count=2,
    )
    screen = shown(decision_record(), decision_record(1, query=again))
    assert [line for line in screen.splitlines() if line.startswith("attempt")] == [
        "attempt 1: prefill w0, decode w1",
        "attempt 2: prefill w0, decode w1",
    ]
    assert (
        "45 tokens to prefill, 5 of them generated by an earlier attempt, at most 16 to generate, 2 samples, priority "
        "-1, TTFT within 500 ms, "
        "avoiding w1 after a failure"
    ) in screen


def test_each_policy_has_a_description() -> None:
    rules = policy_rules()
    assert rules.keys() == POLICIES.keys()
    assert all(rule.endswith(".") for rule in rules.values())
    assert "least load" in rules["least_loaded"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_term_of_a_policy_is_defined_in_the_help(name: str) -> None:
    prefill = measured("p", "prefill", links=(fast_link("q"),), **queued(4000)), measured("q", "prefill", costs=None)
    links = (fast_link("p"), fast_link("q"))
    answer = chosen(seen(*prefill, busy(seqs=1, links=links, recent_prefill_share=0.1), q=200), policy=name)
    named = {term for candidate in answer.candidates for term in candidate.terms}
    assert named <= TERMS.keys()
    text = " ".join(CliRunner().invoke(cli, ["explain", "--help"]).output.split())
    assert all(" ".join(f"{term.label} {term.meaning}".split()) in text for term in TERMS.values())
