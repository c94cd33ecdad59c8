"""The gateway's view of the cluster, and the reasons why it is not ready."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.gateway.cluster.cluster_view import ClusterView
from tests import builders

LAYOUT = replace(builders.layout(), tokenizer_fingerprint="ours")


def report(worker_id: str, role: str, **changes: Any) -> WorkerReport:
    return builders.worker_report(worker_id, role, **({"layout": LAYOUT} | changes))


def view(*reports: WorkerReport) -> ClusterView:
    cluster_view = ClusterView(model="demo", tokenizer_fingerprint="ours", model_max_len=500)
    cluster_view.update(ClusterUpdate(scheduler_id="s", reports=reports))
    return cluster_view


LINKED = {"links": (builders.link("p0"),)}


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        ([], "no ready worker serves demo"),
        ([report("h0", "hybrid")], ""),
        ([report("h0", "hybrid", model="other")], "no ready worker serves demo"),
        ([report("h0", "hybrid", state=WorkerState.STARTING)], "no ready worker serves demo"),
        ([report("h0", "hybrid", state=WorkerState.DRAINING)], "no ready worker serves demo"),
        ([report("h0", "hybrid", layout=builders.layout())], "another tokenizer"),
        ([report("p0", "prefill")], "no decode worker is ready"),
        ([report("d0", "decode", **LINKED)], "no prefill worker is ready"),
        ([report("p0", "prefill"), report("d0", "decode")], "connected to each other"),
        ([report("p0", "prefill"), report("d0", "decode", **LINKED)], ""),
        ([report("p0", "prefill", epoch=2), report("d0", "decode", **LINKED)], "connected to each other"),
        (
            [report("p0", "prefill"), report("d0", "decode", links=(builders.link("p0", broken=True),))],
            "connected to each other",
        ),
        ([report("p0", "prefill"), report("d0", "decode"), report("h0", "hybrid")], ""),
    ],
)
def test_problem_is_empty_only_if_a_request_can_be_served(reports: list[WorkerReport], problem: str) -> None:
    found = view(*reports).problem
    assert problem in found
    assert bool(found) == bool(problem)


def test_last_view_stays_when_the_scheduler_is_lost() -> None:
    seen = view(
        report("h0", "hybrid", max_model_len=300, max_num_seqs=4),
        report("h1", "hybrid", max_model_len=200, max_num_seqs=8),
    )
    assert (seen.model_limits.max_model_len, seen.model_limits.max_num_seqs) == (200, 8)
    seen.scheduler_lost()
    assert seen.problem == "no scheduler answers"
    assert seen.layout == LAYOUT
    assert len(seen.reports) == 2
    seen.update(ClusterUpdate(scheduler_id="s", reports=()))
    assert seen.model_limits.max_model_len == 200  # report of the missing workers


def test_layout_and_fingerprint_follow_the_reports() -> None:
    seen = view(report("h0", "hybrid"), report("h1", "hybrid"))
    before = seen.model_limits.fingerprint
    other = replace(LAYOUT, model_fingerprint="another")
    seen.update(ClusterUpdate(scheduler_id="s", reports=(report("h0", "hybrid"), report("h1", "hybrid", layout=other))))
    both = seen.model_limits.fingerprint
    seen.update(ClusterUpdate(scheduler_id="s", reports=(report("h0", "hybrid", layout=other),)))
    assert seen.layout == other
    assert len({before, both, seen.model_limits.fingerprint}) == 3


def test_model_length_is_that_of_the_model_until_a_worker_reports() -> None:
    cluster_view = ClusterView(model="demo", tokenizer_fingerprint="ours", model_max_len=500)
    assert cluster_view.model_limits.max_model_len == 500
    assert cluster_view.layout is None


def test_links_are_formatted_for_operators() -> None:
    assert view(report("p0", "prefill"), report("d0", "decode", **LINKED)).links == "p0 -> d0 shared-memory 1.00 GB/s"
