"""Stages by hand: they cover the time from the intended send to the last token, and never exceed it."""

from typing import Any

import pytest

from loadgen.measure import request_metrics
from loadgen.measure.measures import Measures
from loadgen.measure.timeline import Stages
from loadgen.report.critical_path import path_by_load, path_of
from tests.loadgen_builders import record, rules


def timeline(**decode: Any) -> dict[str, Any]:
    """A timeline as Baton's gateway sends it over HTTP, with a prefill leg and a decode leg."""
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
    """Due at 1.0, sent at 1.1, tokens at 1.5, 1.6 and 1.8."""
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


def test_scheduler_wait_is_separate_from_placement() -> None:
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


def test_predictions_need_a_single_attempt() -> None:
    complete_timeline = timeline() | {"ttft_s": 0.26, "tpot_s": 0.1, "predicted_ttft_s": 0.2, "predicted_tpot_s": 0.05}
    stages = Stages.of(complete_timeline)
    assert (stages.predicted_ttft_s, stages.placed_ttft_s) == (0.2, pytest.approx(0.25))
    assert (stages.predicted_tpot_s, stages.placed_tpot_s) == (0.05, 0.1)
    retried = Stages.of(complete_timeline | {"attempts": 2})
    assert (retried.placed_ttft_s, retried.placed_tpot_s) == (None, None)
    assert (Stages.of(timeline()).predicted_ttft_s, Stages.of(timeline()).predicted_tpot_s) == (None, None)


def test_stages_longer_than_the_latency_are_shortened() -> None:
    wild = timeline(kv_exposed_s=9.0)
    wild["legs"][0]["queue_s"] = 9.0
    found = dict(path_of(record(timeline=wild), Stages.of(wild)))
    assert found["queue"] == pytest.approx(0.39)
    assert found["prefill"] == found["other, to the first token"] == pytest.approx(0.0)
    assert found["exposed transfer"] == pytest.approx(0.3)
    assert found["decode"] == pytest.approx(0.0)
    assert sum(found.values()) == pytest.approx(0.8)


def test_response_without_a_timeline_has_client_stages_only() -> None:
    assert path_of(record(), Stages()) == [
        ("send lag", pytest.approx(0.1)),
        ("to the first token", pytest.approx(0.4)),
        ("decode", pytest.approx(0.3)),
    ]
    assert path_of(record(tokens=(), is_complete=False), Stages()) == []


def test_single_worker_has_no_handoff() -> None:
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
def test_invalid_timeline_gives_no_stages(garbage: Any) -> None:
    assert Stages.of(garbage) == Stages()


def test_large_integers_can_be_strings() -> None:
    assert Stages.of(timeline(kv_bytes="123456789012")).kv_bytes == 123456789012


def test_load_counts_other_requests_in_flight() -> None:
    """Ten requests one after the other, then ten together."""
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
