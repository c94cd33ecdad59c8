"""The chart's recording and alert rules are valid, use only exported metrics, and fire as expected."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser as ast
import pytest

from tests.deploy.exported import exported, problems
from tests.deploy.rule_cases import Firing, database_of, firing_at, load, seconds

ROOT = Path(__file__).resolve().parents[2]
RULES_FILE = ROOT / "helm/baton/files/rules/baton.yaml"
CASES_FILE = Path(__file__).with_name("alert_cases.yaml")
TROUBLESHOOTING = "docs/guides/troubleshooting.md"
PROMTOOL = shutil.which("promtool")

RULES = load(RULES_FILE)
CASES = load(CASES_FILE)
ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in ALL if "record" in rule}
INTERVAL_S = seconds(CASES["evaluation_interval"])
_LABEL = re.compile(r"[a-zA-Z_]\w*")


def labels_of_result(rule: dict[str, Any]) -> frozenset[str]:
    """Return the labels that the outermost aggregation keeps."""
    node = ast.parse(rule["expr"])
    while not isinstance(node, ast.AggregateExpr):
        node = next(
            part
            for part in (getattr(node, "lhs", None), *getattr(node, "args", []))
            if part is not None and not _is_number(part)
        )
    return frozenset(node.modifier.labels) - {"le"} if node.modifier is not None else frozenset()


def _is_number(node: object) -> bool:
    return isinstance(node, ast.NumberLiteral)


KNOWN = exported() | {name: labels_of_result(rule) for name, rule in RECORDED.items()}


def test_groups_and_rules_have_valid_fields() -> None:
    assert RULES.keys() == {"groups"}
    names = [group["name"] for group in RULES["groups"]]
    assert len(names) == len(set(names))
    assert all(group.keys() == {"name", "rules"} and group["rules"] for group in RULES["groups"])
    assert len(ALERTS) + len(RECORDED) == len(ALL)
    for rule in ALL:
        assert rule.keys() <= (
            {"alert", "expr", "for", "labels", "annotations"} if "alert" in rule else {"record", "expr", "labels"}
        )
        ast.parse(rule["expr"])
        if "for" in rule:
            assert seconds(rule["for"]) > 0
        for kind in ("labels", "annotations"):
            assert all(
                _LABEL.fullmatch(key) and isinstance(value, str) and value for key, value in rule.get(kind, {}).items()
            )
    assert all(re.fullmatch(r"[a-zA-Z_:][\w:]*", name) for name in RECORDED)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_only_exported_names(rule: dict[str, Any]) -> None:
    assert problems(rule["expr"], KNOWN) == []


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_severity_summary_and_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert re.fullmatch(r"Baton[A-Z]\w+", alert)
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == TROUBLESHOOTING
    assert anchor in anchors()
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert label in labels_an_alert_has(rule), f"{alert} has no label {label}"


def anchors() -> list[str]:
    """The anchors of the symptoms in the troubleshooting page."""
    headings = re.findall(r"^### (.*)$", (ROOT / TROUBLESHOOTING).read_text(), re.MULTILINE)
    return [heading.lower().replace(" ", "-") for heading in headings]


def labels_an_alert_has(rule: dict[str, Any]) -> set[str]:
    found: set[str] = {"instance", "namespace", "job"}

    def visit(node: ast.Expr) -> None:
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        elif isinstance(node, ast.VectorSelector) and node.name in RECORDED:
            found.update(KNOWN[node.name])

    ast.walk(ast.parse(rule["expr"]), visit)
    return found


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    fires = {test["alertname"] for case in CASES["tests"] for test in case["alert_rule_test"] if test.get("exp_alerts")}
    stays = {
        test["alertname"] for case in CASES["tests"] for test in case["alert_rule_test"] if not test.get("exp_alerts")
    }
    assert fires == stays == ALERTS.keys()


@pytest.mark.parametrize("case", CASES["tests"], ids=lambda case: case["name"])
def test_alerts_fire_as_expected(case: dict[str, Any]) -> None:
    """Evaluated by `promql`, which supports the part of PromQL that the rules use."""
    times = {test["eval_time"] for test in case["alert_rule_test"]}
    firing = {
        at: firing_at(RULES, database_of(case, seconds(case["interval"])), seconds(at), INTERVAL_S) for at in times
    }
    for test in case["alert_rule_test"]:
        rule = ALERTS[test["alertname"]]
        expected = {
            Firing(
                test["alertname"], frozenset((k, v) for k, v in one["exp_labels"].items() if k not in rule["labels"])
            )
            for one in test.get("exp_alerts", [])
        }
        assert {one for one in firing[test["eval_time"]] if one.alert == test["alertname"]} == expected, test


if PROMTOOL is not None:  # else only the evaluator in `promql` checks the rules

    def test_promtool_gives_the_same_results() -> None:
        assert PROMTOOL is not None
        subprocess.run([PROMTOOL, "check", "rules", str(RULES_FILE)], check=True, timeout=60)
        subprocess.run([PROMTOOL, "test", "rules", "--ignore-unknown-fields", str(CASES_FILE)], check=True, timeout=120)
