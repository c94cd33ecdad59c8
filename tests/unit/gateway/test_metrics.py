"""Metrics of a gateway's requests."""

from baton.core.request import LegTimeline
from baton.gateway.request.delivery import Delivery
from baton.gateway.request.open_request import PHASES, phase_times
from baton.gateway.request.request_run import RequestRecord
from tests.builders import job_id
from tests.unit.gateway.fakes import cluster
from tests.unit.gateway.virtual import virtual


def test_phase_times_cover_all_legs_of_all_attempts() -> None:
    record, delivery = RequestRecord(placed_s=10.5), Delivery((0,))
    delivery.legs = {
        job_id(attempt=0): [LegTimeline(worker_id="p0", pid=1, queue_s=0.1, compute_s=0.2)],
        job_id(attempt=1): [
            LegTimeline(worker_id="p1", pid=2, queue_s=0.3, compute_s=0.4),
            LegTimeline(worker_id="d0", pid=3, kv_wait_s=0.6, kv_exposed_s=0.01, kv_admission_s=0.02, decode_s=3.0),
        ],
    }
    assert list(phase_times(record, delivery, 10.0)) == [
        ("placement", 0.5),
        ("queue", 0.1),
        ("prefill", 0.2),
        ("queue", 0.3),
        ("prefill", 0.4),
        ("kv_exposed", 0.01),
        ("admission", 0.02),
        ("decode", 3.0),
    ]


@virtual
async def test_slo_attainment_is_counted_only_for_requests_with_an_slo() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        await c.complete("hello")
        assert c.registry.get_sample_value("baton_slo_attainment_total", {"term": "ttft", "outcome": "met"}) is None
        await c.complete("hello", slo={"ttft_ms": 60_000, "tpot_ms": 0.001})
        await c.complete("hello", slo={"ttft_ms": 0.001})
        counts = {
            (term, outcome): c.registry.get_sample_value(
                "baton_slo_attainment_total", {"term": term, "outcome": outcome}
            )
            for term in ("ttft", "tpot")
            for outcome in ("met", "missed")
        }
        assert counts == {("ttft", "met"): 1, ("ttft", "missed"): 1, ("tpot", "met"): None, ("tpot", "missed"): 1}


@virtual
async def test_phases_are_observed_once_per_request() -> None:
    async with cluster(("p0", "prefill"), ("d0", "decode")) as c:
        await c.complete("hello")
        counts = [
            c.registry.get_sample_value("baton_request_phase_seconds_count", {"phase": phase}) for phase in PHASES
        ]
        assert dict(zip(PHASES, counts, strict=True)) == dict.fromkeys(PHASES, 0) | {
            "placement": 1,
            "prefill": 1,
            "decode": 1,
        }  # the phases that stub workers report
