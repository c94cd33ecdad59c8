"""A trial while it runs: reading growing files, ending early, and separate seeds and tokens."""

import json
import random
from pathlib import Path

import pytest

from loadgen.capacity.trials import LONGEST_TIMES, STRAGGLERS_S, Goal, RecordTail, TrialLength, TrialWatch, trial_seed
from loadgen.capacity.verdicts import TrialJudge, TrialVerdict, scaled
from loadgen.measure.records import Record
from loadgen.measure.records_file import to_json
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan.plan import Plan
from loadgen.plan.prompt_tokens import tokens_of
from loadgen.plan.sources.workloads import simple_plan
from loadgen.slo_target import SloScale
from tests.loadgen_simulated_servers import complete_record, plan_at, slots


def line(record: Record) -> bytes:
    return json.dumps(to_json(record)).encode() + b"\n"


def watch_of(plan: Plan, file: Path, goals: tuple[Goal, ...] = (Goal(target=0.9),), goal: int = 0) -> TrialWatch:
    judges = [TrialJudge(plan, OutcomeRules(slos=scaled(plan.slos, one.slo_scale)), one.target) for one in goals]
    return TrialWatch(plan, judges, [file], goal=goal)


def play(watch: TrialWatch, file: Path, records: list[Record], until_s: float, step_s: float = 0.25) -> float | None:
    """Return when the watch ends the trial; records are written as requests end."""
    waiting = sorted(records, key=lambda record: record.ended_s)
    with file.open("ab") as out:
        elapsed_s = 0.0
        while elapsed_s < until_s:
            elapsed_s += step_s
            while waiting and waiting[0].ended_s <= elapsed_s:
                out.write(line(waiting.pop(0)))
            out.flush()
            if watch(elapsed_s):
                return elapsed_s
    return None


def test_trial_at_a_low_rate_is_extended() -> None:
    length = TrialLength(seconds=20, requests=45)
    assert [length.at(rate_rps) for rate_rps in (9, 2.25, 0.9)] == [20, 20, 50]
    assert length.at(0.001) == LONGEST_TIMES * 20, "but not for ever"
    assert TrialLength(seconds=20).at(0.001) == 20


def test_lowest_rate_has_enough_requests_in_the_longest_trial() -> None:
    assert TrialLength(seconds=20).min_rps(0.9) == pytest.approx(1)
    assert TrialLength(seconds=20).min_rps(0.99) == pytest.approx(10)
    assert TrialLength(seconds=20, requests=45).min_rps(0.9) == pytest.approx(1 / LONGEST_TIMES)
    assert TrialLength(seconds=20, requests=20).min_rps(0.9) == pytest.approx(1 / LONGEST_TIMES), "that are just enough"
    assert TrialLength(seconds=20, requests=5).min_rps(0.9) == pytest.approx(1), (
        "one that goes on until 5 have come tells no more for it"
    )


def test_clear_miss_ends_the_trial_after_a_quarter(tmp_path: Path) -> None:
    plan = plan_at(24, 40, seed=1, slo="ttft=510ms,e2e=2s")
    records = slots(8, 1.0)(plan, random.Random(1))
    file = tmp_path / "records.jsonl"
    watch = watch_of(plan, file)
    ended_s = play(watch, file, records, 60)
    assert ended_s is not None
    assert 10 <= ended_s <= 11
    judgement = watch.judgements(finished=None)[0]  # type: ignore[arg-type]
    assert judgement.verdict is TrialVerdict.MISSED
    assert judgement.num_judged < 24 * 11


def test_trial_that_meets_the_slo_takes_its_full_time(tmp_path: Path) -> None:
    """It does not wait for a late response that has already missed its SLO."""
    plan = plan_at(4, 40, seed=2, slo="ttft=510ms,e2e=3s")
    *records, last = slots(8, 1.0)(plan, random.Random(2))
    stuck = complete_record(plan.requests[last.index], last.intended_s + 500, last.intended_s + 501)
    file = tmp_path / "records.jsonl"
    watch = watch_of(plan, file)
    ended_s = play(watch, file, [*records, stuck], 100)
    assert ended_s is not None
    assert last.intended_s + 3 <= ended_s <= last.intended_s + 4.5
    judgement = watch.judgements(finished=None)[0]  # type: ignore[arg-type]
    assert judgement.verdict is TrialVerdict.MET
    assert judgement.num_judged - judgement.num_good == 1


def test_wait_for_late_responses_is_limited(tmp_path: Path) -> None:
    plan = plan_at(4, 20, seed=3, slo="ttft=510ms")
    *records, last = slots(8, 1.0)(plan, random.Random(3))
    stuck = complete_record(plan.requests[last.index], last.intended_s + 0.1, last.intended_s + 501)
    file = tmp_path / "records.jsonl"
    watch = watch_of(plan, file)
    ended_s = play(watch, file, [*records, stuck], 200)
    assert ended_s is not None
    assert last.intended_s + STRAGGLERS_S <= ended_s <= last.intended_s + STRAGGLERS_S + 1.5
    judgement = watch.judgements(finished=None)[0]  # type: ignore[arg-type]
    assert (judgement.num_judged - judgement.num_good, judgement.num_open) == (1, 0)


def test_trial_judges_every_goal_but_only_its_own_ends_it(tmp_path: Path) -> None:
    plan = plan_at(10, 40, seed=4)
    goals = (Goal(target=0.9), Goal(target=0.9, slo_scale=SloScale.parse("20")))
    records = slots(8, 1.0)(plan, random.Random(4))
    ends = []
    for asking in (0, 1):
        file = tmp_path / f"records.{asking}.jsonl"
        watch = watch_of(plan, file, goals, asking)
        ended_s = play(watch, file, records, 39)
        ends.append(ended_s)
        if ended_s is not None:
            strict, lax = watch.judgements(finished=None)  # type: ignore[arg-type]
            assert strict.verdict is TrialVerdict.MISSED
            assert strict.share < lax.share == 1
    assert ends[0] is not None
    assert ends[1] is None or ends[1] > ends[0]


def test_record_tail_reads_each_line_once(tmp_path: Path) -> None:
    records = slots(8, 1.0)(plan_at(5, 4, seed=5), random.Random(5))
    first, second = tmp_path / "records.0.jsonl", tmp_path / "records.1.jsonl"
    tail = RecordTail([first, second])
    assert list(tail.read()) == []
    first.write_bytes(line(records[0]) + line(records[1])[:20])
    assert list(tail.read()) == records[:1]
    with first.open("ab") as file:
        file.write(line(records[1])[20:])
    second.write_bytes(line(records[2]))
    assert list(tail.read()) == records[:3]
    assert list(tail.read()) == records[:3]


def test_trials_share_no_tokens_or_arrivals() -> None:
    """This holds within a search and between searches with other seeds, so no trial hits another's cache."""
    plans = [
        simple_plan(rate_rps=5, seconds=10, input_tokens=64, output_tokens=4, seed=trial_seed(seed, number))
        for seed in (0, 1)
        for number in (1, 2)
    ]
    blocks = [{tokens_of(plan, request, {})[:16] for request in plan.requests} for plan in plans]
    assert len(set.union(*blocks)) == sum(map(len, blocks))
    assert len({plan.requests[0].at_s for plan in plans}) == len(plans)
    assert trial_seed(7, 3) == trial_seed(7, 3) < 1 << 48


@pytest.mark.parametrize(
    ("goal", "name"),
    [
        (Goal(target=0.9), "0.9"),
        (Goal(target=0.999, slo_scale=SloScale.parse("0.5")), "0.999 at 0.5 x SLO"),
        (Goal(target=0.9, slo_scale=SloScale.parse("3:6")), "0.9 at 3:6 x SLO"),
    ],
)
def test_goal_name_describes_target_and_scale(goal: Goal, name: str) -> None:
    assert goal.name == name
