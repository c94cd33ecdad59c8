"""Checks in child processes that crash, hang, flood their output or compute wrong numbers."""

import errno
import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.runtime.child import verdict_cache
from baton.runtime.child.child_process import MAX_ERROR_BYTES, NOT_STARTED_CODE, ChildEnd, ChildStop, run_child
from baton.runtime.child.stages import MAX_KNOWN_CHARS, StageRun, StageRunner, StageVerdict, judge_stages
from baton.runtime.child.verdict_cache import MAX_VERDICTS, VerdictCache

ENOUGH_S = 60.0
SHORT_S = 3.0
"""Enough to start a child on a busy machine. Tests of hanging children wait for it."""
FACTS = {"gpu": "H100", "driver": "580.1", "triton": "3.7.1", "source": "abc"}


@pytest.fixture(autouse=True)
def tests_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)


def run(name: str, deadline_s: float = ENOUGH_S, **payload: Any) -> ChildEnd:
    return run_child(f"tests.child_checks:{name}", payload, deadline_s)


def judged(deadline_s: float = ENOUGH_S, **stages: str) -> StageRun:
    return judge_stages("tests.child_checks:judge", {"stages": stages}, list(stages), deadline_s)


def test_answers_are_apart_from_what_libraries_print() -> None:
    end = run("answer", text="ü", number=2)
    assert (end.stop, end.code) == (ChildStop.EXITED, 0)
    assert end.answers[0] == {"got": {"text": "ü", "number": 2}}
    assert end.answers[1]["pid"] != os.getpid()
    assert end.last_lines == ("not an answer",)


def test_a_flood_of_output_is_bounded_and_its_last_line_is_kept() -> None:
    end = run("set_up", end="flood")
    assert end.stop is ChildStop.CRASHED
    assert sum(map(len, end.last_lines)) <= MAX_ERROR_BYTES
    assert "the last line" in end.last_lines
    assert "SIGABRT" in end.text


def test_a_hanging_child_is_ended_with_its_own_children() -> None:
    end = run("hang_with_children", deadline_s=SHORT_S)
    assert end.stop is ChildStop.TIMED_OUT
    pid = end.answers[0]["child"]
    for _ in range(100):
        if not _runs(pid):
            break
        time.sleep(0.05)
    assert not _runs(pid)


def test_a_child_does_not_wait_for_its_threads() -> None:
    end = run("leave_a_thread")
    assert (end.stop, end.code, end.last_lines) == (ChildStop.EXITED, 0, ("the last line",))
    assert end.answers == ({"returned": True},)


@pytest.mark.parametrize(("code", "found", "words"), [(3, 3, ""), ("it failed", 1, ""), (None, 1, "no such model")])
def test_the_exit_code_is_that_of_the_function(code: object, found: int, words: str) -> None:
    end = run("exit_with", code=code)
    assert (end.stop, end.code) == (ChildStop.EXITED, found)
    assert words in " ".join(end.last_lines)


def test_a_child_that_cannot_be_started_has_exited() -> None:
    end = run("answer", text="x" * (1 << 20))
    assert (end.stop, end.code, end.answers) == (ChildStop.EXITED, NOT_STARTED_CODE, ())
    assert "it was not started" in end.text


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_stage_gets_its_own_verdict_whatever_the_others_do() -> None:
    found = judged(first="pass", second="segfault", third="wrong", fourth="pass", fifth="illegal", sixth="abort")
    assert not found.setup_problem
    problems = {name: verdict.problem for name, verdict in found.verdicts.items()}
    assert problems["first"] == problems["fourth"] == ""
    assert "SIGSEGV" in problems["second"]
    assert "_segfault" in problems["second"], "the stack is among the last lines"
    assert problems["third"] == "logits differ by 0.7 of their standard deviation"
    assert problems["fifth"] == "AcceleratorError: an illegal memory access was encountered"
    assert "SIGABRT" in problems["sixth"]
    assert all(verdict.is_lasting for verdict in found.verdicts.values())


def test_a_hanging_stage_uses_up_the_time_of_all() -> None:
    found = judged(deadline_s=SHORT_S, first="pass", second="hang", third="pass")
    assert found.verdicts["first"] == StageVerdict()
    assert "did not end in time" in found.verdicts["second"].problem
    assert not found.verdicts["second"].is_lasting
    assert "third" not in found.verdicts
    assert not found.is_safe


def test_what_memory_decides_is_not_lasting() -> None:
    found = judged(first="memory", second="killed")
    assert {name: verdict.is_lasting for name, verdict in found.verdicts.items()} == {"first": False, "second": False}


@pytest.mark.parametrize(
    "problem",
    [
        "no memory on cuda for a step of 512 tokens: give a smaller one (CUDA out of memory. Tried to allocate 1 GiB)",
        "Qwen3ForCausalLM cannot run with paged attention: OutOfMemoryError: CUDA out of memory. Tried to allocate",
        "a decode step of this model cannot be captured: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in cublasCreate",
    ],
)
def test_lack_of_memory_is_not_lasting_in_an_error_of_baton_either(problem: str) -> None:
    said: list[Mapping[str, Any]] = []

    def check() -> None:
        raise ModelError(problem)

    with pytest.raises(SystemExit):
        StageRunner({}, said.append).run("graphs", check)
    assert said[-1] == {"end": "graphs", "problem": problem, "lasting": False}


@pytest.mark.parametrize(
    ("end", "is_safe", "words"), [("wrong", True, "logits differ by 0.7"), ("abort", False, "SIGABRT")]
)
def test_a_child_that_ends_before_any_stage(end: str, is_safe: bool, words: str) -> None:
    found = judge_stages("tests.child_checks:set_up", {"end": end}, ["one"], ENOUGH_S)
    assert (found.verdicts, found.is_safe) == ({}, is_safe)
    assert words in found.setup_problem


def test_passed_stages_are_not_run_again() -> None:
    known: list[Mapping[str, str]] = []
    ends = iter(
        [
            ChildEnd(
                stop=ChildStop.CRASHED,
                code=-11,
                answers=({"begin": "a"}, {"end": "a", "problem": "", "lasting": True}, {"begin": "b"}),
                last_lines=("x" * 8000,),
            ),
            ChildEnd(stop=ChildStop.EXITED, code=0, answers=({"begin": "c"}, {"end": "c", "problem": ""})),
        ]
    )

    def child(function: str, payload: Mapping[str, Any], deadline_s: float) -> ChildEnd:
        known.append(payload["known"])
        return next(ends)

    found = judge_stages("x:y", {}, ["a", "b", "c"], 10.0, run=child, clock=lambda: 0.0)
    assert [sorted(each) for each in known] == [[], ["a", "b"]]
    assert max(map(len, known[1].values())) <= MAX_KNOWN_CHARS, "a child's arguments are limited"
    assert [verdict.has_passed for verdict in found.verdicts.values()] == [True, False, True]


def test_verdicts_are_found_again_for_the_same_facts_only(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    assert cache.find(FACTS) is None
    cache.keep(FACTS, {"CUDA graphs": "crashed"})
    assert VerdictCache(tmp_path).find(dict(reversed(FACTS.items()))) == {"CUDA graphs": "crashed"}
    for name in FACTS:
        assert cache.find({**FACTS, name: "other"}) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"facts": {}, "verdict": {}}', '{"verdict": 1}'])
def test_a_damaged_verdict_is_reached_again(tmp_path: Path, content: str) -> None:
    cache = VerdictCache(tmp_path)
    cache.keep(FACTS, {"a": ""})
    cache.path(FACTS).write_text(content)
    assert cache.find(FACTS) is None


def test_a_verdict_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    cache.keep(FACTS, {"a": ""})
    cache.path(FACTS).chmod(0o666)
    assert cache.find(FACTS) is None


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = VerdictCache(tmp_path)
    for number in range(MAX_VERDICTS + 5):
        facts = {"number": str(number)}
        cache.keep(facts, {})
        os.utime(cache.path(facts), ns=(0, number))
        with cache.locked(str(number), 1.0):
            pass
    cache.keep(facts, {})
    assert len(list(tmp_path.iterdir())) == MAX_VERDICTS
    assert cache.find({"number": "0"}) is None
    assert cache.find({"number": str(MAX_VERDICTS + 4)}) == {}
    cache.keep(FACTS, {"a": "x" * 100_000})
    assert cache.find(FACTS) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once, however many verdicts there are."""
    (tmp_path / "file").touch()
    logged: list[str] = []
    monkeypatch.setattr(verdict_cache, "log", SimpleNamespace(warning=lambda event, **_: logged.append(event)))
    cache = VerdictCache(tmp_path / "file" / "below")
    with cache.locked("x", 1.0):
        cache.keep(FACTS, {"a": ""})
        cache.keep(FACTS | {"more": ""}, {"a": ""})
    assert logged == ["verdict_not_kept"]
    assert cache.find(FACTS) is None


def test_a_held_lock_delays_only_for_a_limited_time(tmp_path: Path) -> None:
    cache, times = VerdictCache(tmp_path), iter([0.0, 0.5, 1.5])
    waits: list[None] = []
    other = VerdictCache(tmp_path).locked("x", 1.0, on_wait=lambda: waits.append(None), clock=lambda: next(times))
    with cache.locked("x", 1.0), other:
        pass
    assert next(times, None) is None
    assert len(waits) == 1


def test_verdicts_of_another_kind_are_not_waited_for(tmp_path: Path) -> None:
    waits: list[None] = []
    with (
        VerdictCache(tmp_path).locked("x", 1.0),
        VerdictCache(tmp_path).locked("y", 1.0, on_wait=lambda: waits.append(None)),
    ):
        assert not waits


def test_without_locks_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    times = iter([0.0])
    with VerdictCache(tmp_path).locked("x", 1.0, clock=lambda: next(times)):
        pass
