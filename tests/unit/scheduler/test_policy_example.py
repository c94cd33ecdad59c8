"""The policy that the guide prints is the one in examples/, and works as the guide says."""

import re
from pathlib import Path

import pytest

from baton.core.cluster.placement import Placement
from baton.core.ids import DecisionId
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.policies import POLICIES, Policy
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.policy_loading.load_policy import load_policy
from tests.builders import blocks, cluster, link, query, worker_report
from tests.unit.scheduler.policy_cases import context, ids

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs/guides/scheduling-policy.md").read_text()
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a scheduling policy\n")[1].split("\n## ")[0]
NAME = "most_free:most_free"


@pytest.fixture
def most_free(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """The policy of the example, loaded as `--policy` loads it."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return load_policy(NAME)


def test_guide_prints_the_example() -> None:
    assert re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) == [(ROOT / "examples/most_free.py").read_text()]
    assert f"baton up --policy {NAME}" in GUIDE


def test_example_policy_chooses_the_workers_with_the_most_free_blocks(most_free: Policy) -> None:
    workers = [
        worker_report(f"{role}{free}", role, blocks=blocks(total=100, free=free))
        for role in ("prefill", "decode")
        for free in (30, 90, 60)
    ]
    choice = most_free(query(), cluster(*workers), context())
    assert isinstance(choice, Choice)
    assert ids(choice) == ("prefill90", "decode90")
    assert {c.worker.worker_id: c.terms for c in choice.candidates if c.side == "decode"} == {
        "decode30": {"free_blocks": 30},
        "decode60": {"free_blocks": 60},
        "decode90": {"free_blocks": 90},
    }


def test_example_policy_breaks_ties_by_id_and_reads_over_no_broken_link(most_free: Policy) -> None:
    prefill = [worker_report(name, "prefill") for name in ("p2", "p1")]
    choice = most_free(query(), cluster(*prefill, worker_report("d", "decode")), context())
    assert isinstance(choice, Choice)
    assert ids(choice) == ("p1", "d")
    choice = most_free(
        query(), cluster(*prefill, worker_report("d", "decode", links=(link("p1", broken=True),))), context()
    )
    assert isinstance(choice, Choice)
    assert ids(choice) == ("p2", "d")


def test_placement_names_the_policy_by_module_and_function(most_free: Policy) -> None:
    rules = DecisionRules(decision_number=0)
    decision = decide(DecisionId("1"), "s", NAME, most_free, query(), cluster(worker_report("h", "hybrid")), rules)
    assert isinstance(decision.answer, Placement)
    assert decision.answer.policy == NAME


def test_files_and_registry_that_contributing_names_exist() -> None:
    named = re.findall(r"`([\w/]+/\w+(?:\.py)?|test_\w+\.py|__init__\.py)`", SECTION)
    folders = [ROOT, ROOT / "services/baton", ROOT / "services/baton/scheduler/policies", ROOT / "tests/unit/scheduler"]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
    assert len(named) >= 5
    registry = (ROOT / "services/baton/scheduler/policies/__init__.py").read_text()
    assert all(f'"{name}": {name},' in registry for name in POLICIES), "the section adds a line of this form"
