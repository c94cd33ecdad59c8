"""The Grafana dashboard of the chart is up to date, complete, and uses only exported metrics."""

import re
import subprocess
import sys
from pathlib import Path

import promql_parser as ast
import pytest

from tests.deploy.dashboard_queries import dashboard, queries
from tests.deploy.exported import exported, grouping_labels, problems

ROOT = Path(__file__).resolve().parents[2]
KNOWN = exported()
ASKED_FOR = {
    "request rate": "baton_requests_total",
    "SLO attainment": "baton_slo_attainment_total",
    "TTFT heat map": "baton_ttft_seconds_bucket",
    "TPOT heat map": "baton_tpot_seconds_bucket",
    "P queue": "baton_waiting_prefill_tokens",
    "D queue": "baton_running_seqs",
    "KV flow": "baton_transfer_bytes_total",
    "cache": "baton_prefix_hit_tokens_total",
    "reloads of KV": "baton_reloads_total",
    "defects on disks": "baton_disk_kv_defects_total",
    "speed of transfer backends": "baton_link_backend_bytes_per_second",
    "prediction error": "baton_predicted_over_actual_ratio_bucket",
}


def test_dashboard_file_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/gen_dashboard.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_panels_are_complete_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["title"]
        assert panel["type"] == "row" or panel["targets"]


def test_variables_are_declared() -> None:
    text = (ROOT / "helm/baton/files/dashboards/baton.json").read_text()
    declared = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)\}?", text)) - {"__rate_interval", "__all"} == declared


@pytest.mark.parametrize("query", [query for _, query in queries()], ids=[name for name, _ in queries()])
def test_queries_use_only_exported_names(query: str) -> None:
    assert problems(query, KNOWN) == []


def test_legends_use_labels_of_the_result() -> None:
    for name, query in queries():
        node = ast.parse(query)
        of_result = grouping_labels(query) | {"instance"} | set().union(*(KNOWN[s] for s in KNOWN if s in query))
        assert set(re.findall(r"\{\{(\w+)\}\}", name)) <= of_result, (name, node)


@pytest.mark.parametrize("what", ASKED_FOR)
def test_dashboard_covers_the_operators_questions(what: str) -> None:
    kinds = [
        panel["type"]
        for panel in dashboard()["panels"]
        for t in panel.get("targets", [])
        if ASKED_FOR[what] in t["expr"]
    ]
    assert "heatmap" in kinds if "heat map" in what else kinds


def test_wrong_name_is_detected() -> None:
    assert problems('rate(baton_requests{code="200"}[5m])', KNOWN) == ["no metric baton_requests"]
    assert problems('rate(baton_requests_total{status="200"}[5m])', KNOWN) == [
        "baton_requests_total has no label status"
    ]
    assert problems("sum by (worker) (baton_open_requests)", KNOWN) == ["nothing has a label worker"]
    assert problems("sum by (role) (baton_kv_blocks * on (instance) group_left (role) baton_worker_info)", KNOWN) == []
