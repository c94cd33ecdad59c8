"""A full search on simulated trials: shared goals, invalid trials, interrupts, time limits and errors."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadgen.capacity.capacity_file import NAME, PointResult, write_capacity
from loadgen.capacity.capacity_search import Limits, Proposal, State
from loadgen.capacity.search_runner import MAX_INVALID, SearchResult, is_answered, run_searches
from loadgen.capacity.trials import Goal, Trial, TrialLength
from loadgen.capacity.verdicts import Judgement, TrialVerdict
from loadgen.commands.capacity_plans import maker_of
from loadgen.commands.capacity_text import answer_lines, short_trials, trial_line, unreachable_goals
from loadgen.loadgen_errors import LoadgenError, WarmUpFailed
from loadgen.measure.stats import Interval
from loadgen.send.run.processes import Interrupted
from loadgen.send.server.server_process import SweepPoint
from loadgen.slo_target import SloScale
from tests.loadgen_simulated_servers import plan_at

ONE = (Goal(target=0.9),)


def judged(share: float, num: int = 400) -> Judgement:
    return Judgement(
        num_good=round(share * num),
        num_judged=num,
        num_open=0,
        interval=Interval(low=max(0.0, share - 0.03), high=min(1.0, share + 0.03)),
        growth_rps=0.0,
        is_overloaded=False,
        verdict=TrialVerdict.MET if share > 0.93 else TrialVerdict.MISSED if share < 0.87 else TrialVerdict.UNDECIDED,
    )


class Server:
    """A simulated server with capacity 10 at SLO scale 1, and more at laxer scales. `before` replaces a
    trial."""

    def __init__(
        self, goals: tuple[Goal, ...] = ONE, before: Callable[[int, Trial], Trial] = lambda _, trial: trial
    ) -> None:
        self._goals = goals
        self._before = before
        self.asked: list[tuple[Proposal, int]] = []

    def run(self, proposal: Proposal, goal: int) -> Trial:
        self.asked.append((proposal, goal))

        def share(goal: Goal) -> float:
            return 1 / (1 + math.exp(15 * math.log(proposal.rate_rps / (10 * goal.slo_scale.ttft**0.25)) - math.log(9)))

        trial = Trial(
            directory=f"{len(self.asked):02d}",
            rate_rps=proposal.rate_rps,
            seconds=60.0,
            is_scout=proposal.is_scout,
            seed=len(self.asked),
            judgements=tuple(judged(share(one)) for one in self._goals),
            goal=goal,
            duration_s=60.0,
        )
        return self._before(len(self.asked), trial)


def search(server: Server, goals: tuple[Goal, ...] = ONE, **changes: Any) -> tuple[SearchResult, list[SearchResult]]:
    updates: list[SearchResult] = []
    limits = changes.pop("limits", Limits(start_rps=4.0))
    options: dict[str, Any] = {"confidence": 0.95, "time_limit_s": 1e9, "on_update": updates.append, **changes}
    return run_searches(goals, [limits] * len(goals), server, **options), updates


def test_search_finds_the_capacity_and_reports_each_trial() -> None:
    server = Server()
    found, updates = search(server)
    answer = found.answers[0]
    assert answer.state is State.FOUND
    assert answer.capacity_rps == pytest.approx(10, rel=0.05)
    assert is_answered(answer)
    assert [len(one.trials) for one in updates] == list(range(1, len(server.asked) + 1))
    assert updates[-1].trials == found.trials


def test_later_goals_use_the_trials_of_earlier_ones() -> None:
    goals = (
        Goal(target=0.9),
        Goal(target=0.9, slo_scale=SloScale.parse("1.2")),
        Goal(target=0.9, slo_scale=SloScale.parse("8")),
    )
    server = Server(goals)
    found, _ = search(server, goals)
    near, far = 10 * 1.2**0.25, 10 * 8**0.25
    assert [answer.capacity_rps for answer in found.answers] == pytest.approx([10, near, far], rel=0.05)
    asked_by = [sum(goal == asking for _, asking in server.asked) for goal in range(3)]
    assert asked_by[1] < asked_by[0] / 2
    assert not any(proposal.is_scout for proposal, goal in server.asked if goal)
    assert all(answer.num_trials == found.answers[0].num_trials for answer in found.answers)


def test_a_trial_that_ended_early_tells_other_goals_only_what_they_missed() -> None:
    """Its queue has not grown yet, so a laxer SLO looks met at any rate."""
    goals = (Goal(target=0.9), Goal(target=0.9, slo_scale=SloScale.parse("2")), Goal(target=0.99))

    def end_early(number: int, trial: Trial) -> Trial:
        if trial.goal or trial.is_scout or trial.judgements[0].verdict is not TrialVerdict.MISSED:
            return trial
        _, _, strict = trial.judgements
        return replace(trial, ended_early=True, duration_s=15.0, judgements=(trial.judgements[0], judged(1.0), strict))

    found, _ = search(Server(goals, before=end_early), goals)
    early = sum(trial.ended_early for trial in found.trials)
    full = sum(not trial.is_scout for trial in found.trials)
    assert early
    assert [answer.num_trials for answer in found.answers] == [full, full - early, full]
    assert found.answers[1].capacity_rps == pytest.approx(10 * 2**0.25, rel=0.05)


def test_a_trial_of_full_length_counts_for_all_goals_though_its_last_responses_were_not_awaited() -> None:
    goals = (Goal(target=0.9), Goal(target=0.9, slo_scale=SloScale.parse("2")))
    found, _ = search(Server(goals, before=lambda number, trial: replace(trial, ended_early=True)), goals)
    full = sum(not trial.is_scout for trial in found.trials)
    assert [answer.num_trials for answer in found.answers] == [full, full]


def test_invalid_trial_is_repeated() -> None:
    server = Server(before=lambda number, trial: replace(trial, invalid=("late",)) if number in (2, 5) else trial)
    found, _ = search(server)
    assert found.answers[0].state is State.FOUND
    rates = [proposal.rate_rps for proposal, _ in server.asked]
    assert rates[1] == rates[2]
    assert rates[4] == rates[5]
    assert found.answers[0].num_trials + found.answers[0].num_scouts == len(server.asked) - 2


def test_consecutive_invalid_trials_end_the_search() -> None:
    server = Server(
        before=lambda _, trial: (
            replace(trial, invalid=("the generator was late: more",)) if trial.rate_rps > 5 else trial
        )
    )
    found, _ = search(server)
    assert len(server.asked) == 1 + MAX_INVALID
    answer = found.answers[0]
    assert answer.state is State.STOPPED
    assert "the generator was late" in answer.why
    assert not is_answered(answer)


@pytest.mark.parametrize("error", [Interrupted("twice"), KeyboardInterrupt()])
def test_interrupt_ends_the_search_and_keeps_results(error: BaseException) -> None:
    def before(number: int, trial: Trial) -> Trial:
        if number == 9:
            raise error
        return trial

    found, _ = search(Server(before=before))
    assert found.is_interrupted
    assert found.error == ""
    assert len(found.trials) == 8
    assert found.answers[0].state is State.STOPPED
    assert found.answers[0].interval is not None


def test_interrupt_while_writing_keeps_results() -> None:
    def on_update(found: SearchResult) -> None:
        raise KeyboardInterrupt

    found, _ = search(Server(), on_update=on_update)
    assert found.is_interrupted
    assert (len(found.trials), found.answers[0].state) == (1, State.STOPPED)


def test_interrupted_trial_is_not_an_observation() -> None:
    server = Server(before=lambda number, trial: replace(trial, is_interrupted=number == 3))
    found, _ = search(server)
    assert found.is_interrupted
    assert len(found.trials) == 3
    assert found.answers[0].num_scouts == 2


def test_error_ends_the_search_with_its_estimate() -> None:
    def before(number: int, trial: Trial) -> Trial:
        if number == 8:
            raise LoadgenError("nothing answers")
        return trial

    found, _ = search(Server(before=before))
    assert found.error == "nothing answers"
    assert (found.answers[0].state, found.answers[0].why) == (State.STOPPED, "nothing answers")
    assert len(found.trials) == 7


def test_failed_warm_up_is_retried() -> None:
    """After an overload the server may also reject the next trial's warm-up."""
    refusals = iter((7, 8, 11))
    due = next(refusals)

    def before(number: int, trial: Trial) -> Trial:
        nonlocal due
        if number == due:
            due = next(refusals, 0)
            raise WarmUpFailed("refused")
        return trial

    server = Server(before=before)
    found, _ = search(server)
    assert (found.error, found.answers[0].state) == ("", State.FOUND)
    assert len(found.trials) == len(server.asked) - 3


def test_repeated_warm_up_failures_end_the_search() -> None:
    def before(number: int, trial: Trial) -> Trial:
        if number >= 7:
            raise WarmUpFailed("refused")
        return trial

    server = Server(before=before)
    found, _ = search(server)
    assert (found.error, found.answers[0].state) == ("refused", State.STOPPED)
    assert len(server.asked) == 6 + MAX_INVALID


def test_time_limit_ends_the_search() -> None:
    clock = iter(range(0, 10_000, 60))
    found, _ = search(Server(), time_limit_s=300.0, clock=lambda: float(next(clock)))
    assert found.answers[0].state is State.STOPPED
    assert "time limit" in found.answers[0].why
    assert 4 <= len(found.trials) <= 6


# Output.


def lines(found: SearchResult) -> list[str]:
    return [
        text for text, _ in answer_lines(PointResult(point=SweepPoint(values={}), found=found), "requests", 0.95, 0.1)
    ]


def test_last_line_has_the_capacity() -> None:
    found, _ = search(Server())
    answer = found.answers[0]
    assert answer.interval is not None
    assert lines(found)[-1] == (
        f"capacity {answer.capacity_rps:.3g} req/s [{answer.interval.low:.3g}, {answer.interval.high:.3g}] at 90 "
        "% joint attainment "
        f"(95 % confidence, {answer.num_trials} trials)"
    )
    wide, _ = search(Server(), limits=Limits(start_rps=4.0, resolution=0.001, max_trials=6))
    assert "wide" in lines(wide)[0]
    assert lines(wide)[1].startswith("capacity ")
    above, _ = search(Server(), limits=Limits(start_rps=4.0, max_rps=6.0))
    assert lines(above) == [
        "capacity above 6 req/s at 90 % joint attainment: the SLO was met at the highest allowed rate"
    ]
    below, _ = search(Server(), limits=Limits(start_rps=40.0, min_rps=30.0))
    assert lines(below)[0].startswith("capacity below 30 req/s at 90 % joint attainment")
    late = {"invalid": ("late",), "remedies": ("--processes 2: busy",)}
    stopped, _ = search(Server(before=lambda number, trial: replace(trial, **late) if number > 4 else trial))
    assert lines(stopped)[0] == "stopped: 3 trials in a row were invalid: late; change --processes 2: busy"
    assert lines(stopped)[1].startswith("capacity unknown at 90 % joint attainment: ")


def test_trial_line_shows_rate_share_and_verdict_or_problem() -> None:
    trial = Server().run(Proposal(rate_rps=9.0, is_scout=False), 0)
    assert trial_line(trial, "requests", ONE).split() == ["01", "9", "requests/s", "97.8%", "of", "400", "SLO", "met"]
    broken = replace(trial, invalid=("the generator was late: 9 ms; do something",), notes=("not at rest",))
    assert trial_line(broken, "requests", ONE).endswith("INVALID: the generator was late: 9 ms; not at rest")
    several = (*ONE, Goal(target=0.99))
    assert "(0.99)" in trial_line(replace(trial, goal=1, judgements=trial.judgements * 2), "requests", several)


def test_capacity_file_has_answers_and_trials(tmp_path: Path) -> None:
    goals = (Goal(target=0.9), Goal(target=0.9, slo_scale=SloScale.parse("2:3")))
    found, _ = search(Server(goals), goals)
    point = PointResult(
        point=SweepPoint(values={"p": "1", "d": "2"}),
        found=found,
        command=("serve", "--p", "1"),
        facts={"url": "http://x"},
    )
    write_capacity(tmp_path, {"unit": "requests"}, [point])
    write_capacity(
        tmp_path,
        {"unit": "requests"},
        [point, PointResult(point=SweepPoint(values={"p": "2", "d": "1"}), error="did not start")],
    )
    data = json.loads((tmp_path / NAME).read_text())
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (data["loadgen_capacity"], data["unit"]) == (1, "requests")
    first, second = data["points"]
    assert (first["name"], first["values"], first["command"], first["url"]) == (
        "p=1,d=2",
        {"p": "1", "d": "2"},
        ["serve", "--p", "1"],
        "http://x",
    )
    assert [answer["slo_scale"] for answer in first["answers"]] == [1.0, None]
    assert [(answer["ttft_scale"], answer["tpot_scale"]) for answer in first["answers"]] == [(1.0, 1.0), (2.0, 3.0)]
    for answer in first["answers"]:
        assert answer["low_rps"] < answer["capacity_rps"] < answer["high_rps"]
        assert answer["state"] in [state.value for state in State]
    assert len(first["trials"]) == len(found.trials)
    assert all(len(trial["judgements"]) == 2 and 0 <= trial["judgements"][0]["share"] <= 1 for trial in first["trials"])
    assert (second["error"], second["answers"], second["trials"]) == ("did not start", [], [])


# Warnings.


def test_sessions_longer_than_trials_give_a_warning() -> None:
    """Ten turns with 30 s between them; a trial of one minute sees only their start."""
    plan = maker_of(["sessions", "--turns", "10", "--think", "30s"], 60.0).make(1.0, 60.0, seed=1)
    (said,) = short_trials(plan, TrialLength(seconds=60))
    assert "is 270 s" in said
    assert "--seconds 540" in said
    assert not list(short_trials(plan, TrialLength(seconds=540)))
    assert not list(short_trials(plan_at(5, 60, seed=1), TrialLength(seconds=1)))


def test_goal_that_the_plan_cannot_reach_gives_a_warning() -> None:
    """A fifth of the requests cancel, and each prompt has 48 of 64 tokens."""
    plan = maker_of(["random", "--cancel", "0.2", "--input-tokens", "48", "--output-tokens", "16"], 60.0).make(
        5.0, 60.0, seed=1
    )
    goals = (Goal(target=0.9), Goal(target=0.5))
    (said,) = unreachable_goals(plan, goals, 64)
    assert "cancel early" in said
    assert "exceed" not in said
    assert "0.9 cannot" in said
    assert not list(unreachable_goals(plan, goals[1:], None))
    (said,) = unreachable_goals(plan, goals[1:], 63)
    assert f"{len(plan.requests)} exceed the server's max_model_len of 63 tokens" in said
