"""Judges several things in child processes, one after the other, although each of them may end its process.

A child begins with the first thing that is not judged yet. It ends after one that fails, because a failure
may have broken its device. The next child goes on after it.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import BatonError
from baton.runtime.child.child_process import ChildEnd, ChildStop, run_child

Report = Callable[[Mapping[str, Any]], None]
RunChild = Callable[[str, Mapping[str, Any], float], ChildEnd]

_LASTING_ERRORS = frozenset({"AcceleratorError"})
"""Names of errors of the device that a repetition would raise again, besides Baton's own."""
_LACK_OF_MEMORY = re.compile(r"MemoryError|out of memory|ALLOC_FAILED", re.IGNORECASE)
"""Texts of errors that say nothing about a stage: other processes may have taken the memory. Baton's own
errors quote the library's."""
_OUT_OF_MEMORY_KILL = -9
"""The kernel ends a process with SIGKILL if memory is short: this says nothing about what it did."""
MAX_PROBLEM_CHARS = 2000
MAX_KNOWN_CHARS = 100
"""Characters of a problem that later children get. They only need to know that there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageVerdict:
    """The verdict of one stage.

    problem: empty if it passed.
    is_lasting: a repetition on the same machine and software would give the same verdict.
    """

    problem: str = ""
    is_lasting: bool = True

    @property
    def has_passed(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """The verdicts, by stage, and why others were not reached.

    setup_problem: how a child ended outside of a stage; empty if none did.
    is_safe: no child was ended by a signal or by the deadline outside of a stage.
    """

    verdicts: Mapping[str, StageVerdict]
    setup_problem: str = ""
    is_safe: bool = True


class StageRunner:
    """The child's side: runs the stages that are not judged yet."""

    def __init__(self, known: Mapping[str, str], report: Report) -> None:
        """known: the beginning of the problem of each judged stage, empty if it passed."""
        self._known = known
        self._report = report

    def run(self, name: str, check: Callable[[], object]) -> bool:
        """Return True if the stage has passed, now or before.

        If it fails now, the exception is reported and ends the child: raises SystemExit.
        """
        if name in self._known:
            return not self._known[name]
        self._report({"begin": name})
        try:
            check()
        except Exception as error:  # whatever it is, it is the verdict
            own = isinstance(error, BatonError)
            text = str(error) if own else f"{type(error).__name__}: {error}"
            lasting = (own or type(error).__name__ in _LASTING_ERRORS) and not _LACK_OF_MEMORY.search(text)
            self._report({"end": name, "problem": text[:MAX_PROBLEM_CHARS] or "failed", "lasting": lasting})
            raise SystemExit(1) from error
        self._report({"end": name, "problem": "", "lasting": True})
        return True


def judge_stages(
    function: str,
    payload: Mapping[str, Any],
    stages: Sequence[str],
    deadline_s: float,
    *,
    run: RunChild = run_child,
    clock: Callable[[], float] = time.monotonic,
) -> StageRun:
    """Run `function` in as many children as needed, at most one for each stage and one more.

    function: takes the payload with `known` in it, see `StageRunner`. deadline_s: for all children together.
    A stage that passes is judged once, and one that fails, too.
    """
    verdicts: dict[str, StageVerdict] = {}
    ends_s = clock() + deadline_s
    for _child in range(len(stages) + 1):
        left_s = ends_s - clock()
        if left_s <= 0:
            return StageRun(verdicts=verdicts, setup_problem=f"no time left of {deadline_s:g} s", is_safe=False)
        known = {name: verdict.problem[:MAX_KNOWN_CHARS] for name, verdict in verdicts.items()}
        end = run(function, {**payload, "known": known}, left_s)
        found = verdicts_of(end)
        verdicts.update(found)
        if all(name in verdicts for name in stages) or (end.stop is ChildStop.EXITED and end.code == 0):
            return StageRun(verdicts=verdicts)
        if all(verdict.has_passed for verdict in found.values()):  # it ended before a stage, or between two
            is_safe = end.stop is ChildStop.EXITED
            return StageRun(verdicts=verdicts, setup_problem=end.text, is_safe=is_safe)
    raise AssertionError("each child but the last judges a stage")


def verdicts_of(end: ChildEnd) -> dict[str, StageVerdict]:
    """Return the verdicts that one child has reached, of the stage that ended it, too."""
    found: dict[str, StageVerdict] = {}
    begun = ""
    for answer in end.answers:
        if "begin" in answer:
            begun = str(answer["begin"])
        elif "end" in answer:
            begun = ""
            found[str(answer["end"])] = StageVerdict(
                problem=str(answer.get("problem", "")), is_lasting=bool(answer.get("lasting", False))
            )
    if begun:
        is_lasting = end.stop is ChildStop.CRASHED and end.code != _OUT_OF_MEMORY_KILL
        found[begun] = StageVerdict(problem=end.text, is_lasting=is_lasting)
    return found
