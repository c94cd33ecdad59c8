"""Decision records explain a decision, stay small, and suffice to repeat it."""

import tracemalloc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import Slo
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.decisions.decide import DecisionRules
from baton.scheduler.decisions.decision_records import (
    MAX_CANDIDATES,
    repeat_decision,
)
from baton.scheduler.policies import POLICIES
from baton.scheduler.scheduler_budget import record_bytes
from tests.builders import query
from tests.unit.scheduler.decided import decide, many
from tests.unit.scheduler.measured_workers import decoding, fast_link, measured, queued, random_cluster, seen


def test_record_has_the_best_candidates_of_both_sides_and_counts_the_others() -> None:
    drained = replace(measured("z", "decode"), state=type(measured("z", "decode").state).DRAINING)
    cluster = seen(*(w.report for w in many(20).workers), drained)
    record = decide(query(num_prompt_tokens=2000, block_hashes=(b"h" * 16,)), cluster).to_record()
    assert record.placement is not None
    assert len(record.candidates) == MAX_CANDIDATES
    assert {c.side for c in record.candidates} == {"prefill", "decode"}
    chosen = [c for c in record.candidates if c.worker in (record.placement.prefill, record.placement.decode)]
    assert len(chosen) >= 2
    assert chosen == list(record.candidates[: len(chosen)])
    prefill = next(c for c in record.candidates if c.side == "prefill")
    assert {"queue_s", "prefix_pull_s", "prefill_s", "transfer_s", "cost_s"} <= prefill.terms.keys()
    assert prefill.terms["queue_s"] == record.placement.queue_s
    assert record.num_excluded == {"draining": 1, "predicted slower": 32}, (
        "16 to decode; 16 to prefill, without the decode worker, which can spare nothing"
    )
    assert record.query.block_hashes == ()


def test_record_does_not_grow_with_the_cluster() -> None:
    asking = query(num_prompt_tokens=2000)
    assert len(decide(asking, many(60)).to_record().inputs) < 16_000


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 1_000_000))
@example(seed=65_474)  # four workers hold more of the prefix than the decode worker, but are not readable
@example(seed=857_646)  # of six workers that hold the same prefix, the decode worker has most to send
@example(seed=10_863)  # the candidate that holds most of the prefix is slow, and the others are charged for it
def test_decision_is_repeated_from_its_record(policy: str, seed: int) -> None:
    random = Random(seed)
    cluster = random_cluster(random, most=24)
    asking = query(
        num_prompt_tokens=random.choice([1, 100, 700]),
        max_tokens=random.choice([1, 100]),
        attempt=random.choice([0, 0, 1]),
        slo=Slo(ttft_s=random.choice([None, 0.1, 5.0]), tpot_s=random.choice([None, 0.01])),
        avoid=tuple(w.worker for w in cluster.workers if random.random() < 0.1),
    )
    rules = DecisionRules(
        decision_number=seed,
        admission=random.choice(list(AdmissionMode)),
        max_waiting_seqs=6,
        max_worker_queue_s=random.choice([None, 0.01, 1.0]),
        ahead_s=random.choice([0.0, 2.0]),
    )
    decided = decide(asking, cluster, policy, f"{seed:016x}", rules)
    stored = from_plain(DecisionRecord, to_plain(decided.to_record()))
    assert repeat_decision(stored) == decided.answer


def test_repeated_decision_does_not_consider_other_prefix_holders() -> None:
    """Of six holders of the same prefix, the four with the least to send are considered.

    The readers of the first two are not in the record, so in the record these have nothing to send.
    """
    holders = [measured(f"h{i}", "prefill", **queued(50_000)) for i in range(6)]
    links = (fast_link("h0"), *(fast_link(f"h{i}", bytes_per_s=1e4) for i in range(1, 6)))
    readers = [
        measured(
            f"r{i}", "decode", **decoding(40), links=tuple(fast_link(f"h{j}", inflight_bytes=10**9) for j in (0, 1))
        )
        for i in range(6)
    ]
    decodes = [measured(f"d{i}", "decode", **decoding(20)) for i in range(4)]
    cluster = seen(
        measured("a", "prefill", links=links), *decodes, *holders, *readers, **{f"h{i}": 60 for i in range(6)}
    )
    decided = decide(query(num_prompt_tokens=2000), cluster)
    assert decided.choice is not None
    assert decided.choice.prefix_source is None
    record = decided.to_record()
    assert "h0" in {c.worker.worker_id for c in record.candidates}
    assert repeat_decision(record) == decided.answer


def test_repeat_fails_for_unknown_policy_or_missing_inputs() -> None:
    record = decide(query(), many(2)).to_record()
    for other in (
        replace(record, policy="oracle"),
        replace(record, inputs=""),
        replace(record, inputs='{"workers":[]}'),
    ):
        with pytest.raises(
            ValueError, match=r"unknown; must be one of|inputs were not recorded|malformed or of another release"
        ):
            repeat_decision(other)


def test_memory_of_a_record_covers_its_objects() -> None:
    record = decide(query(request_id=b"r", block_hashes=(b"h" * 16,)), many(20)).to_record()
    tracemalloc.start()
    kept = [replace(from_plain(DecisionRecord, to_plain(record)), inputs=record.inputs + " ") for _ in range(50)]
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert num_bytes / len(kept) < record_bytes(record)
