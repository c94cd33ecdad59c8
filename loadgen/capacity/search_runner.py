"""Runs the searches of all goals against one server until each is done, stopped, or out of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.capacity.capacity_search import CapacityEstimate, CapacitySearch, Limits, Proposal, State
from loadgen.capacity.trials import Goal, Trial
from loadgen.capacity.verdicts import TrialVerdict
from loadgen.loadgen_errors import LoadgenError, WarmUpFailed
from loadgen.send.run.processes import Interrupted
from loadgen.send.timers import now_s

MAX_INVALID = 3
"""Consecutive trials that may be invalid or fail to start. After that the search stops: the rate is not the
cause."""


class TrialRunner(Protocol):
    """Interface with which a search runs its trials; `loadgen.capacity.trials.Trials` implements it."""

    def run(self, proposal: Proposal, goal: int) -> Trial:
        """Run a trial for the goal with this index. Raises LoadgenError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of the searches on one server.

    - `answers`: estimates in the order of `goals`
    - `is_interrupted`: ended by the user
    - `error`: what ended the search early
    """

    goals: tuple[Goal, ...]
    answers: tuple[CapacityEstimate, ...]
    trials: tuple[Trial, ...]
    is_interrupted: bool = False
    error: str = ""


def run_searches(
    goals: Sequence[Goal],
    limits: Sequence[Limits],
    trials: TrialRunner,
    *,
    confidence: float,
    time_limit_s: float,
    on_update: Callable[[SearchResult], None],
    clock: Callable[[], float] = now_s,
) -> SearchResult:
    """Search for all goals and return the result.

    Each goal uses the trials of all goals, and requests more only if those do not suffice. `limits` has one
    entry for each goal. `on_update` is called with the result after each trial. Errors end the search and are
    returned in the result; only exceptions of `on_update` are raised.
    """
    run = _SearchRun(goals, limits, trials, confidence=confidence, deadline_s=clock() + time_limit_s, clock=clock)
    try:
        run.search_all(on_update, f"the time limit of {time_limit_s:g} s (--time-limit) was reached")
    except (Interrupted, KeyboardInterrupt):  # can happen at any time: in a trial, or while a result is written
        run.is_interrupted = True
        run.stop("interrupted")
    return run.result


class _SearchRun:
    """The searches of all goals and their common trials."""

    def __init__(
        self,
        goals: Sequence[Goal],
        limits: Sequence[Limits],
        trials: TrialRunner,
        *,
        confidence: float,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._goals = tuple(goals)
        self._searches = [
            CapacitySearch(goal.target, limit, confidence=confidence) for goal, limit in zip(goals, limits, strict=True)
        ]
        self._trials = trials
        self._deadline_s = deadline_s
        self._clock = clock
        self._done: list[Trial] = []
        self._num_invalid = 0
        self._error = ""
        self.is_interrupted = False

    @property
    def result(self) -> SearchResult:
        """The result so far."""
        return SearchResult(
            goals=self._goals,
            answers=tuple(search.answer for search in self._searches),
            trials=tuple(self._done),
            is_interrupted=self.is_interrupted,
            error=self._error,
        )

    def stop(self, why: str) -> None:
        """End all searches."""
        for search in self._searches:
            search.stop(why)

    def search_all(self, on_update: Callable[[SearchResult], None], out_of_time: str) -> None:
        """Run trials until every search is over. Raises Interrupted or KeyboardInterrupt."""
        for goal, search in enumerate(self._searches):
            while (proposal := search.next()) is not None:
                if self._clock() > self._deadline_s:
                    self.stop(out_of_time)
                    break
                trial = self._run_trial(proposal, goal)
                if trial is not None:
                    self._observe(trial, goal)
                    on_update(self.result)

    def _run_trial(self, proposal: Proposal, goal: int) -> Trial | None:
        """Run a trial and return it, or None if it could not start.

        It is then repeated, unless the searches were stopped.
        """
        try:
            return self._trials.run(proposal, goal)
        except Interrupted:
            raise
        except LoadgenError as error:
            self._num_invalid += 1
            if not (isinstance(error, WarmUpFailed) and self._num_invalid < MAX_INVALID):
                self._error = str(error)
                self.stop(self._error)
            return None  # after a failed warm-up, the next trial waits again until the server is idle

    def _observe(self, trial: Trial, goal: int) -> None:
        """Add a trial to all searches. Too many invalid ones in a row stop them."""
        self._done.append(trial)
        self._num_invalid = self._num_invalid + 1 if trial.invalid else 0
        if trial.is_interrupted:
            raise KeyboardInterrupt
        if self._num_invalid >= MAX_INVALID:
            advice = "".join(f"; change {remedy}" for remedy in trial.remedies[:1])
            self.stop(f"{self._num_invalid} trials in a row were invalid: {trial.invalid[0]}{advice}")
        elif not trial.invalid:
            for position, search in enumerate(self._searches):
                judgement = trial.judgements[position]
                if trial.is_shortened and position != goal and judgement.verdict is not TrialVerdict.MISSED:
                    continue  # the queue might have grown in the rest of the trial
                search.observe(judgement.observation(trial.rate_rps), is_scout=trial.is_scout, is_own=position == goal)


def is_answered(answer: CapacityEstimate) -> bool:
    """True if the estimate has an interval for the capacity."""
    return answer.interval is not None and answer.state in (State.FOUND, State.WIDE)
