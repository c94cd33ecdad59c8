"""A policy of another module: what is refused at start, and what a failure in service does."""

import re
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, Reason, Refused
from baton.runtime.config.config_base import settings_of
from baton.runtime.config.settings import SchedulerConfig, load_settings
from baton.scheduler.policies import POLICIES
from baton.scheduler.policy_loading.checked_policy import checked
from baton.scheduler.policy_loading.load_policy import load_policy
from baton.scheduler.policy_loading.trial_placements import TRIALS, place_on_trial
from baton.sim.chaos.run import run_seed
from tests.builders import cluster, query, worker_report
from tests.unit.scheduler.policy_cases import context

HEAD = """
from baton.scheduler.policies.pairing import pick_pair
from baton.scheduler.policies.policy_types import Choice
from baton.core.cluster.decision_record import Candidate
"""
FIRST = "pick_pair(query, cluster, context, lambda workers, side: workers[0])"
FAILS_AT_START = {
    "other arguments": ("def policy(query): ...", r"policy\(query\) does not take three arguments"),
    "a class": ("class policy: ...", "is a class; must be a function"),
    "a number": ("policy = 7", "is of type int; must be a function"),
    "async": ("async def policy(query, cluster, context): ...", "is async"),
    "another name": ("def polcy(query, cluster, context): ...", "has no 'policy'; did you mean 'polcy'"),
    "syntax": ("def policy(:", "import failed: SyntaxError"),
    "exits": ("raise SystemExit(0)", "import failed: SystemExit"),
    "missing dependency": ("import no_such_package", "import failed: ModuleNotFoundError.*no_such_package"),
    "raises": (
        "def policy(query, cluster, context):\n    return cluster.workers[7]",
        r"trial placement \(a prefill, a decode and a hybrid worker\): IndexError: .*, at .*:\d+",
    ),
    "no workers": (
        f"def policy(query, cluster, context):\n    cluster.workers[0]\n    return {FIRST}",
        r"trial placement \(no workers\): IndexError",
    ),
    "returns a worker": (
        "def policy(query, cluster, context):\n    return cluster.workers[0]",
        "it returned WorkerView.*must return a Choice or a Rejection",
    ),
    "another role": (
        "def policy(query, cluster, context):\n    return Choice(prefill=None, decode=cluster.workers[-1])",
        "'prefill-0' to decode, which cannot: other role",
    ),
    "one worker twice": (
        "def policy(query, cluster, context):\n    worker = cluster.workers[0]\n"
        "    return Choice(prefill=worker, decode=worker)",
        "for both sides",
    ),
    "a term that is no number": (
        "def policy(query, cluster, context):\n"
        "    return pick_pair(query, cluster, context, lambda workers, side: workers[0], lambda worker: {'id': 'x'})",
        "term 'id' of a candidate is 'x'",
    ),
    "not pure": (
        "from random import shuffle, seed\nseed(1)\ndef pick(workers, side):\n    workers = list(workers) * 50\n"
        "    shuffle(workers)\n    return workers[0]\n"
        "def policy(query, cluster, context):\n    return pick_pair(query, cluster, context, pick)",
        "answered the same question differently",
    ),
}


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with the code that the test is parametrized with."""
    name = "policy_" + re.sub(r"\W", "_", request.node.name)
    (tmp_path / f"{name}.py").write_text(HEAD + request.param)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(("module", "problem"), FAILS_AT_START.values(), ids=FAILS_AT_START, indirect=["module"])
def test_policy_that_cannot_work_is_refused_at_start_with_the_cause(module: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        load_policy(f"{module}:policy")
    assert f"{module}:policy" in str(raised.value)


def test_missing_module_is_named_with_the_places_that_were_searched() -> None:
    with pytest.raises(ConfigError, match=r"no module 'nowhere' in .* or on the Python path; install it") as raised:
        load_policy("nowhere.policies:mine")
    assert str(Path.cwd()) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("time:policy", "time has no 'policy'"), ("concurrent:policy", r"it is a package: name its module, such as conc")],
)
def test_module_without_a_file_and_package_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_policy(name)


@pytest.mark.parametrize("name", ["kv_centrc", "mine.py", "a:b:c", "a.b", ":f", "m:", "m:f()", "../m:f"])
def test_setting_takes_names_and_functions_of_modules_only(name: str) -> None:
    with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
        load_settings(SchedulerConfig, flags={"policy": name}, environ={})
    with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
        load_policy(name)


def test_schema_of_the_setting_accepts_the_same_texts() -> None:
    (setting,) = (each for each in settings_of(SchedulerConfig) if each.name == "policy")
    names, functions = setting.schema()["anyOf"]
    assert names["enum"] == list(POLICIES)
    assert re.search(functions["pattern"], "my_company.policies:most_free")
    assert not re.search(functions["pattern"], "policies/most_free.py")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.description)
def test_every_policy_of_baton_passes_the_trial_placements(name: str, trial: object) -> None:
    place_on_trial(name, checked(POLICIES[name]), trial)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module",
    [f"def policy(query, cluster, context):\n    1 / (query.max_tokens - 13)\n    return {FIRST}"],
    indirect=True,
)
def test_policy_that_fails_later_fails_one_request_with_500(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(f"{module}:policy")
    workers = cluster(worker_report("h", "hybrid"))
    policy(query(max_tokens=12), workers, context())
    with pytest.raises(Refused, match=f"policy {module}:policy failed") as refused:
        policy(query(max_tokens=13), workers, context())
    assert (refused.value.failure.code.http, refused.value.failure.reason) == (500, Reason.INTERNAL)
    assert "ZeroDivisionError" not in refused.value.failure.message, "clients do not see the operator's code"
    policy(query(max_tokens=14), workers, context())


@pytest.mark.sim
def test_storm_runs_with_a_policy_of_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that always takes the first worker is slow, and still no request fails."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "examples")
    report = run_seed(1, policy="most_free:most_free")
    assert "policy=most_free:most_free" in report.settings
    assert report.replay == "python -m baton.sim.chaos --seed 1 --policy most_free:most_free"
    assert report.outcomes["finished"] > 0
