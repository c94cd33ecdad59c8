"""The worked example "Add a scheduling policy" of CONTRIBUTING.md runs as it is printed."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from baton.scheduler.policies import POLICIES, Policy
from baton.scheduler.policies.policy_types import Choice
from tests.builders import blocks, cluster, link, query, worker_report
from tests.unit.scheduler.policy_cases import context, ids

ROOT = Path(__file__).resolve().parents[3]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a scheduling policy\n")[1].split("\n## ")[0]


@pytest.fixture
def most_free(tmp_path: Path) -> Policy:
    """The policy of the example, loaded from the file that its first step adds."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    file = tmp_path / "most_free.py"
    file.write_text(textwrap.dedent(code))
    spec = importlib.util.spec_from_file_location("most_free", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy: Policy = module.most_free
    return policy


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


def test_files_and_registry_of_the_example_exist() -> None:
    named = re.findall(r"`([\w/]+/\w+(?:\.py)?|test_\w+\.py|\w+_aware\.py|__init__\.py)`", SECTION)
    folders = [ROOT, ROOT / "services/baton", ROOT / "services/baton/scheduler/policies", ROOT / "tests/unit/scheduler"]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []
    assert len(named) >= 5
    registry = (ROOT / "services/baton/scheduler/policies/__init__.py").read_text()
    assert all(f'"{name}": {name},' in registry for name in POLICIES), "the example adds a line of this form"
