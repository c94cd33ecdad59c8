"""Runs one trial of a search: makes a plan for its rate, sends it to an idle server, and evaluates it.

Each trial has its own seed and therefore its own arrivals, lengths and tokens. Trials are independent of each
other, and no trial finds its prompts in a cache because of an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loadgen.capacity.capacity_search import Proposal
from loadgen.capacity.verdicts import LOOKS, Judgement, TrialJudge, TrialVerdict, scaled
from loadgen.loadgen_errors import EmptyPlan
from loadgen.measure.records import Record
from loadgen.measure.records_file import from_json
from loadgen.measure.remedies import remedies
from loadgen.measure.request_metrics import OutcomeRules, why_invalid
from loadgen.plan.plan import Plan
from loadgen.send.run.processes import ProgressView
from loadgen.send.run.run_plan import FinishedRun, RunSpec, record_files, run
from loadgen.send.server.idle import IdleResult
from loadgen.slo_target import UNSCALED, SloScale

LONGEST_TIMES = 10.0
"""Longest trial as a multiple of the requested seconds, however low its rate."""
SCOUT_PART = 0.25
SCOUT_REQUESTS = 20
"""A scout takes SCOUT_PART of a trial's time, or longer if that has fewer requests than SCOUT_REQUESTS."""
SEEDS_TRIED = 5
"""Seeds to try, because a plan of few requests may turn out empty."""
LAST_LOOK = len(LOOKS) - 1
STRAGGLERS_S = 30.0
"""Wait for late responses after the last arrival, at least. A longer trial waits as long as it lasted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal of a search: the highest rate at which the share `target` meets the SLO scaled by `slo_scale`."""

    target: float
    slo_scale: SloScale = UNSCALED

    @property
    def name(self) -> str:
        """The goal in text form."""
        return f"{self.target:.4g}" if self.slo_scale == UNSCALED else f"{self.target:.4g} at {self.slo_scale} x SLO"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLength:
    """Length of trials: `seconds`, extended at low rates until about `requests` requests were offered."""

    seconds: float
    requests: int = 0

    def at(self, rate_rps: float) -> float:
        """Return the length in seconds of a trial at `rate_rps`."""
        return max(self.seconds, min(self.requests / rate_rps, self.longest_s))

    @property
    def longest_s(self) -> float:
        """Longest possible trial in seconds."""
        return self.seconds * (LONGEST_TIMES if self.requests else 1.0)

    def min_rps(self, target: float) -> float:
        """Return the lowest rate at which trials have enough requests to judge `target`.

        If the target is just met, at least two requests must miss their SLO.
        """
        needed = max(SCOUT_REQUESTS / 2, round(2 / (1 - target), 6))  # 1 - 0.9 is less than 0.1
        return needed / (self.longest_s if self.requests >= needed else self.seconds)


class PlanMaker(Protocol):
    """Makes a workload at any rate. `unit` is what the rate counts: requests or sessions."""

    unit: str

    def max_rps(self, seconds: float) -> float:
        """Return the highest rate for which the workload has enough requests for `seconds`."""

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        """Return a plan with arrivals for `seconds`. Raises BadPlan."""


class IdleWaiter(Protocol):
    """Waits until the server is idle (`loadgen.send.server.idle`)."""

    def wait(self) -> IdleResult:
        """Wait until the server is idle, up to a limit. Raises LoadgenError if it does not respond at
        first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a trial.

    - `directory`: its name among the trials
    - `judgements`: one for each goal
    - `goal`: index of the goal that requested it
    - `ended_early`: a stop condition ended it; at its full length, if late responses could no longer be good
    - `invalid`: why the trial is invalid; empty if it is valid
    - `remedies`: which option to change then
    """

    directory: str
    rate_rps: float
    seconds: float
    is_scout: bool
    seed: int
    judgements: tuple[Judgement, ...]
    goal: int
    duration_s: float
    ended_early: bool = False
    is_interrupted: bool = False
    invalid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def is_shortened(self) -> bool:
        """True if it ended before its full length, because the verdict was certain."""
        return self.ended_early and self.duration_s < self.seconds


def trial_seed(seed: int, number: int) -> int:
    """Return the 48-bit seed of trial `number`, unique also among searches with other seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:6], "little")


def trial_notes(finished: FinishedRun, rest: IdleResult) -> tuple[str, ...]:
    """Return remarks on a trial that do not make it invalid."""
    busy = () if rest.is_idle else (f"the server was not idle after waiting {rest.waited_s:.0f} s",)
    warm = (finished.cache.text,) if finished.cache.is_warm else ()
    return (*busy, *warm, *finished.notes, *finished.not_answered)


class Trials:
    """Runs the trials of a capacity search against one server: one load run for each proposed rate.

    - `maker`: makes the plan of a trial
    - `goals`: SLOs and attainments whose capacity is searched
    - `idle_waiter`: waits between trials until the server is idle
    - `seed`: seed from which the seed of each trial is drawn
    - `spec`: the run specification without plan, directory and processes
    - `length`: length of a full trial
    - `slos_of`: applies the SLOs to a plan
    - `processes_of`: number of processes that send a plan
    - `show`: progress view for a plan
    """

    def __init__(
        self,
        spec: RunSpec,
        maker: PlanMaker,
        goals: Sequence[Goal],
        idle_waiter: IdleWaiter,
        *,
        length: TrialLength,
        seed: int,
        slos_of: Callable[[Plan], Plan],
        processes_of: Callable[[Plan], int],
        show: Callable[[Plan], AbstractContextManager[ProgressView]],
    ) -> None:
        self._spec = spec
        self._maker = maker
        self._goals = goals
        self._idle_waiter = idle_waiter
        self._length = length
        self._seed = seed
        self._slos_of = slos_of
        self._processes_of = processes_of
        self._show = show
        self._num_made = 0

    def run(self, proposal: Proposal, goal: int) -> Trial:
        """Run a trial. `goal` requested it and may end it early. Raises LoadgenError or Interrupted."""
        seconds = self._length.at(proposal.rate_rps)
        if proposal.is_scout:
            seconds = min(seconds, max(seconds * SCOUT_PART, SCOUT_REQUESTS / proposal.rate_rps))
        plan, seed = self._plan(proposal.rate_rps, seconds)
        rest = self._idle_waiter.wait()
        name = f"{self._num_made:02d}-{proposal.rate_rps:g}rps" + ("-scout" if proposal.is_scout else "")
        spec = replace(
            self._spec,
            plan=plan,
            out=self._spec.out / name,
            processes=self._processes_of(plan),
            flags=self._flags(plan, proposal, seed),
        )
        watch = TrialWatch(plan, self._judges(spec), record_files(spec), goal=goal)
        with self._show(plan) as view:
            finished = run(spec, view, watch)
        judgements = watch.judgements(finished)
        scale = SloScale.strictest([goal.slo_scale for goal in self._goals])
        strictest = replace(finished.rules, slos=scaled(finished.rules.slos, scale))
        invalid = why_invalid(finished.run, finished.records, strictest)
        if not any(judgement.num_judged for judgement in judgements):
            invalid = (*invalid, "no request was due in the steady window; give longer --seconds")
        advice = remedies(finished.run, finished.records, strictest) if invalid else ()
        return Trial(
            directory=name,
            rate_rps=proposal.rate_rps,
            seconds=seconds,
            is_scout=proposal.is_scout,
            seed=seed,
            judgements=judgements,
            goal=goal,
            duration_s=finished.run.duration_s,
            ended_early=finished.ended.ended_early,
            is_interrupted=finished.ended.is_interrupted,
            invalid=invalid,
            notes=trial_notes(finished, rest),
            remedies=advice,
        )

    def _plan(self, rate_rps: float, seconds: float) -> tuple[Plan, int]:
        for attempt in range(SEEDS_TRIED):
            self._num_made += 1
            seed = trial_seed(self._seed, self._num_made)
            try:
                return self._slos_of(self._maker.make(rate_rps, seconds, seed)), seed
            except EmptyPlan:
                if attempt == SEEDS_TRIED - 1:
                    raise
        raise AssertionError

    def _judges(self, spec: RunSpec) -> list[TrialJudge]:
        rules = spec.target.rules(spec.plan)
        return [
            TrialJudge(
                spec.plan,
                OutcomeRules(slos=scaled(rules.slos, goal.slo_scale), ignore_eos=rules.ignore_eos),
                goal.target,
            )
            for goal in self._goals
        ]

    def _flags(self, plan: Plan, proposal: Proposal, seed: int) -> dict[str, Any]:
        return {
            **self._spec.flags,
            "rate": proposal.rate_rps,
            "seed": seed,
            "slo": {name: str(slo) for name, slo in plan.slos.items()},
        }


class RecordTail:
    """Reads files that other processes append to, one line per write. Each part is read only once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._read = dict.fromkeys(files, 0)
        self._records: list[Record] = []

    def read(self) -> Sequence[Record]:
        """Return all complete records so far. Files that do not exist yet are skipped."""
        for path, done in self._read.items():
            try:
                with path.open("rb") as file:
                    file.seek(done)
                    data = file.read()
            except FileNotFoundError:
                continue
            lines = data[: data.rfind(b"\n") + 1]
            self._records += [from_json(json.loads(line)) for line in lines.splitlines() if line.strip()]
            self._read[path] = done + len(lines)
        return self._records


class TrialWatch:
    """Stop condition of a trial: evaluates it while it runs. `goal` is the one whose verdict may end it
    early."""

    def __init__(self, plan: Plan, judges: Sequence[TrialJudge], files: Sequence[Path], *, goal: int) -> None:
        self._judges = judges
        self._tail = RecordTail(files)
        self._goal = goal
        self._looks = [(part * judges[goal].ends_s, look) for look, part in enumerate(LOOKS[:-1])]
        self._next_end_s = judges[goal].ends_s
        self._cut: tuple[Judgement, ...] | None = None

    def __call__(self, elapsed_s: float) -> bool:
        if self._cut is None:
            self._cut = self._early(elapsed_s) or self._at_end(elapsed_s)
        return self._cut is not None

    def judgements(self, finished: FinishedRun) -> tuple[Judgement, ...]:
        """Return the final judgements of a run that has ended, or those at which it was stopped."""
        return self._cut or self._judged(finished.records, math.inf, LAST_LOOK)

    def _early(self, elapsed_s: float) -> tuple[Judgement, ...] | None:
        due = [look for at_s, look in self._looks if at_s <= elapsed_s]
        if not due:
            return None
        look = due[-1]
        del self._looks[: len(due)]
        records = self._tail.read()
        if self._judges[self._goal].judge(records, elapsed_s, look=look).verdict is not TrialVerdict.MISSED:
            return None
        return self._judged(records, elapsed_s, look)

    def _at_end(self, elapsed_s: float) -> tuple[Judgement, ...] | None:
        """After the last arrival, wait only for requests that can still become good."""
        if elapsed_s < self._next_end_s:
            return None
        self._next_end_s = elapsed_s + 1.0
        ends_s = self._judges[self._goal].ends_s
        still_waits = elapsed_s < ends_s + max(STRAGGLERS_S, ends_s)
        found = self._judged(self._tail.read(), elapsed_s if still_waits else math.inf, LAST_LOOK)
        return None if any(judgement.num_open for judgement in found) else found

    def _judged(self, records: Sequence[Record], now_s: float, look: int) -> tuple[Judgement, ...]:
        return tuple(judge.judge(records, now_s, look=look) for judge in self._judges)
