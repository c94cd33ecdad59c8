"""A whole search against one server: one trial after another until every goal has its answer, nothing more
can be tried, or time is up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.capacity.capacity import CapacityEstimate, CapacitySearch, Limits, Proposal, State
from loadgen.capacity.trials import Goal, Trial
from loadgen.loadgen_errors import LoadgenError, NoWarmUp
from loadgen.send.run.processes import Interrupted
from loadgen.send.timers import now_s

MAX_INVALID = 3
"""Trials one after the other that were invalid, or could not begin, after which no more are tried: it is not
the rate."""


class TrialRunner(Protocol):
    """Runs trials (`loadgen.capacity.trials.Trials`)."""

    def run(self, proposal: Proposal, goal: int) -> Trial: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`answers`: by goal, in their order. `is_interrupted`: by the user. `error`: what ended it before its
    time."""

    goals: tuple[Goal, ...]
    answers: tuple[CapacityEstimate, ...]
    trials: tuple[Trial, ...]
    is_interrupted: bool = False
    error: str = ""


def find(
    goals: Sequence[Goal],
    limits: Sequence[Limits],
    trials: TrialRunner,
    *,
    confidence: float,
    time_limit_s: float,
    told: Callable[[Found], None],
    clock: Callable[[], float] = now_s,
) -> Found:
    """`limits`: by goal. Every goal learns from every trial; each asks for more only where that did not
    suffice. `told` hears what is known after each trial. Raises nothing but what `told` raises: whatever went
    wrong, what is known is returned, with the `error`."""
    searches = [
        CapacitySearch(goal.target, limit, confidence=confidence) for goal, limit in zip(goals, limits, strict=True)
    ]
    done: list[Trial] = []
    began_s = clock()
    is_interrupted, error = False, ""

    def found() -> Found:
        return Found(
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
                    stop(f"the time limit of {time_limit_s:g} s was reached")
                    break
                try:
                    trial = trials.run(proposal, asking)
                except Interrupted:
                    raise
                except LoadgenError as raised:
                    num_invalid += 1
                    if isinstance(raised, NoWarmUp) and num_invalid < MAX_INVALID:
                        continue  # the next trial waits again until the server is at rest
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
                        other.told(observation, is_scout=trial.is_scout, is_own=position == asking)
                told(found())

    try:
        search_all()
    except (
        Interrupted,
        KeyboardInterrupt,
    ):  # at any moment: in a trial, or while the last one's result is being written
        is_interrupted = True
        stop("interrupted")
    return found()


def is_answered(answer: CapacityEstimate) -> bool:
    """Whether it says where the capacity is."""
    return answer.interval is not None and answer.state in (State.FOUND, State.WIDE)
