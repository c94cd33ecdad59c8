"""Runs the searches of all goals against one server until each is done, stopped, or out of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.capacity.capacity_search import CapacityEstimate, CapacitySearch, Limits, Proposal, State
from loadgen.capacity.trials import Goal, Trial
from loadgen.loadgen_errors import LoadgenError, WarmUpFailed
from loadgen.send.run.processes import Interrupted
from loadgen.send.timers import now_s

MAX_INVALID = 3
"""Consecutive trials that may be invalid or fail to start. After that the search stops: the rate is not the
cause."""


class TrialRunner(Protocol):
    """Runs trials (`loadgen.capacity.trials.Trials`)."""

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
    searches = [
        CapacitySearch(goal.target, limit, confidence=confidence) for goal, limit in zip(goals, limits, strict=True)
    ]
    done: list[Trial] = []
    began_s = clock()
    is_interrupted, error = False, ""

    def found() -> SearchResult:
        return SearchResult(
            goals=tuple(goals),
            answers=tuple(search.answer for search in searches),
            trials=tuple(done),
            is_interrupted=is_interrupted,
            error=error,
        )

    def stop(why: str) -> None:
        for search in searches:
            search.stop(why)

    def search_all() -> None:
        nonlocal is_interrupted, error
        num_invalid = 0
        for asking, search in enumerate(searches):
            while (proposal := search.next()) is not None:
                if clock() - began_s > time_limit_s:
                    stop(f"the time limit of {time_limit_s:g} s (--time-limit) was reached")
                    break
                try:
                    trial = trials.run(proposal, asking)
                except Interrupted:
                    raise
                except LoadgenError as raised:
                    num_invalid += 1
                    if isinstance(raised, WarmUpFailed) and num_invalid < MAX_INVALID:
                        continue  # the next trial waits again until the server is idle
                    error = str(raised)
                    stop(error)
                    break
                done.append(trial)
                num_invalid = num_invalid + 1 if trial.invalid else 0
                if trial.is_interrupted:
                    raise KeyboardInterrupt
                if num_invalid >= MAX_INVALID:
                    stop(f"{num_invalid} trials in a row were invalid: {trial.invalid[0]}")
                elif not trial.invalid:
                    for position, other in enumerate(searches):
                        observation = trial.judgements[position].observation(trial.rate_rps)
                        other.observe(observation, is_scout=trial.is_scout, is_own=position == asking)
                on_update(found())

    try:
        search_all()
    except (
        Interrupted,
        KeyboardInterrupt,
    ):  # can happen at any time: in a trial, or while a result is being written
        is_interrupted = True
        stop("interrupted")
    return found()


def is_answered(answer: CapacityEstimate) -> bool:
    """True if the estimate has an interval for the capacity."""
    return answer.interval is not None and answer.state in (State.FOUND, State.WIDE)
