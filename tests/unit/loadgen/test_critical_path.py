"""Stages by hand: they leave no gap between the intended send and the last token, and never claim more than
the client has seen."""

from typing import Any

import pytest

from loadgen.measure import request_metrics
from loadgen.measure.measures import Measures
from loadgen.measure.timeline import Stages
from loadgen.report.critical_path import path_by_load, path_of
from tests.loadgen_builders import record, rules


def timeline(**decode: Any) -> dict[str, Any]:
    """As Baton's gateway tells it over HTTP: a prefill leg and a decode leg."""
    prefill = {"worker_id": "p0", "queue_s": 0.05, "compute_s": 0.2, "num_computed_tokens": 10, "num_cached_tokens": 0}
    pulled = {
        "worker_id": "d0",
        "kv_bytes": 4096,
        "kv_exposed_s": 0.02,
        "kv_admission_s": 0.01,
        "kv_transfer_s": 0.1,
        "decode_s": 0.2,
    }
    return {"placed_s": 0.01, "attempts": 1, "policy": "kv_centric", "legs": [prefill, pulled | decode]}


def test_stages_sum_to_e2e() -> None:
    """Due 1.0, sent 1.1, tokens at 1.5, 1.6 and 1.8."""
    answer = record(timeline=timeline())
    found = path_of(answer, Stages.of(answer.timeline))
    assert found == [
        ("send lag", pytest.approx(0.1)),
        ("placement", pytest.approx(0.01)),
        ("queue", pytest.approx(0.05)),
        ("prefill", pytest.approx(0.2)),
        ("other, to the first token", pytest.approx(0.14)),
        ("exposed transfer", pytest.approx(0.02)),
        ("admission", pytest.approx(0.01)),
        ("decode", pytest.approx(0.27)),
    ]
    assert sum(seconds for _, seconds in found) == pytest.approx(0.8)


def test_a_wait_at_the_scheduler_is_told_apart_from_placing() -> None:
    waited = timeline(first_decode_s=0.03) | {"placed_s": 0.09, "waiting_s": 0.08}
    stages = Stages.of(waited)
    found = dict(path_of(record(timeline=waited), stages))
    assert list(found) == [
        "send lag", "waiting at the scheduler", "placement", "queue", "prefill", "other, to the first token",
        "exposed transfer", "admission", "first decode step", "decode",
    ]  # fmt: skip
    assert (found["waiting at the scheduler"], found["placement"]) == (pytest.approx(0.08), pytest.approx(0.01))
    assert (found["first decode step"], found["decode"]) == (pytest.approx(0.03), pytest.approx(0.24))
    assert sum(found.values()) == pytest.approx(0.8)
    assert stages.wait_s == request_metrics.queue_s(record(timeline=waited)) == pytest.approx(0.13), (
        "for a worker, wherever"
    )


def test_predictions_compare_from_the_placement_on_and_for_one_attempt_only() -> None:
    told = timeline() | {"ttft_s": 0.26, "tpot_s": 0.1, "predicted_ttft_s": 0.2, "predicted_tpot_s": 0.05}
    stages = Stages.of(told)
    assert (stages.predicted_ttft_s, stages.placed_ttft_s) == (0.2, pytest.approx(0.25))
    assert (stages.predicted_tpot_s, stages.placed_tpot_s) == (0.05, 0.1)
    retried = Stages.of(told | {"attempts": 2})
    assert (retried.placed_ttft_s, retried.placed_tpot_s) == (None, None)
    assert (Stages.of(timeline()).predicted_ttft_s, Stages.of(timeline()).predicted_tpot_s) == (None, None)


def test_a_timeline_that_claims_too_much_is_cut() -> None:
    wild = timeline(kv_exposed_s=9.0)
    wild["legs"][0]["queue_s"] = 9.0
    found = dict(path_of(record(timeline=wild), Stages.of(wild)))
    assert found["queue"] == pytest.approx(0.39)
    assert found["prefill"] == found["other, to the first token"] == pytest.approx(0.0)
    assert found["exposed transfer"] == pytest.approx(0.3)
    assert found["decode"] == pytest.approx(0.0)
    assert sum(found.values()) == pytest.approx(0.8)


def test_without_a_timeline_the_client_still_knows_two_stages() -> None:
    assert path_of(record(), Stages()) == [
        ("send lag", pytest.approx(0.1)),
        ("to the first token", pytest.approx(0.4)),
        ("decode", pytest.approx(0.3)),
    ]
    assert path_of(record(tokens=(), is_complete=False), Stages()) == []


def test_one_worker_for_both_has_no_hand_off() -> None:
    both = {
        "legs": [
            {
                "worker_id": "h0",
                "queue_s": 0.0,
                "compute_s": 0.3,
                "num_computed_tokens": 10,
                "decode_s": 0.2,
                "kv_bytes": 0,
            }
        ]
    }
    stages = Stages.of(both)
    assert not stages.is_handed_off
    assert (stages.handoff_s, stages.exposed_s, stages.kv_bytes) == (None, None, None)
    assert stages.queue_s == 0.0


@pytest.mark.parametrize(
    "garbage", [[], "x", {"legs": 3}, {"legs": [3, None]}, {"placed_s": "soon", "legs": [{"queue_s": -1}]}]
)
def test_what_is_no_timeline_says_nothing(garbage: Any) -> None:
    assert Stages.of(garbage) == Stages()


def test_large_integers_may_be_texts() -> None:
    assert Stages.of(timeline(kv_bytes="123456789012")).kv_bytes == 123456789012


def test_load_is_how_many_others_were_in_flight() -> None:
    """Ten requests, each alone, then ten at once."""
    alone = [
        record(i, tokens=(10.0 * i + 0.5, 10.0 * i + 1.0), intended_s=10.0 * i, sent_s=10.0 * i, timeline=timeline())
        for i in range(10)
    ]
    crowd = [
        record(10 + i, tokens=(201.0, 202.0), intended_s=200 + i / 100, sent_s=200 + i / 100, timeline=timeline())
        for i in range(10)
    ]
    loads = path_by_load(Measures.of([*alone, *crowd], rules("")))
    assert (loads[0].low, loads[0].count >= 10) == (0, True)
    assert loads[-1].high == 9
    assert sum(load.count for load in loads) == 20
