"""Goodput with one worker of a role down counts only times in which nothing else was disturbed."""

from tests.nemesis.goodput import Goodput, Observed, RoleGoodput, measure
from tests.nemesis.history import End, Interval, Record
from tests.nemesis.plan import Fault
from tests.nemesis.run import Options


def answered_at(end_s: float) -> Record:
    record = Record(number=0, case="", way="", gateway="", begin_s=0.0, deadline_s=99.0)
    record.end(End.COMPLETE, end_s)
    return record


def observed(kind: str, target: str, begin_s: float, end_s: float) -> Observed:
    fault = Fault(kind=kind, targets=(target,), begin_s=begin_s, duration_s=1.0)
    return Observed(fault=fault, begin_s=begin_s, end_s=end_s)


def role(goodput: Goodput, name: str) -> RoleGoodput:
    return next(each for each in goodput.roles if each.role == name)


CALM = Interval(name="calm", begin_s=0.0, end_s=10.0)
BEFORE = [answered_at(i / 10) for i in range(100)]  # ten a second before 10 s


def test_share_of_goodput_while_one_worker_of_a_role_is_down() -> None:
    records = [*BEFORE, *(answered_at(20 + i / 4) for i in range(160))]  # four a second after 20 s
    faults = [
        observed("kill", "d0", 20.0, 30.0),
        observed("pause", "p0", 22.0, 33.0),  # so soon that the kill does not count
        observed("kill", "h0", 32.0, 40.0),  # begins while another fault is open
        observed("kill", "p1", 42.0, 55.0),
        observed("kill_service", "gateway", 52.0, 54.0),  # ends the time that counts
    ]
    found = measure(records, CALM, faults)
    prefill = role(found, "prefill")
    assert (prefill.without, prefill.during, prefill.during_s, prefill.share) == (10.0, 4.0, 10.0, 0.4)
    assert not prefill.is_measured, "ten seconds are too few for a verdict"
    assert str(prefill).startswith("not measured: prefill: ")
    assert role(found, "decode").during_s == role(found, "hybrid").during_s == 0.0


def test_role_with_too_little_goodput_is_a_problem_although_the_others_have_enough() -> None:
    records = [*BEFORE, *(answered_at(20 + i / 10) for i in range(400)), *(answered_at(60 + i) for i in range(20))]
    kills = [
        observed("kill", "p0", 20.0, 40.0),
        observed("kill", "d1", 40.0, 60.0),
        observed("kill", "h0", 60.0, 80.0),
    ]
    found = measure(records, CALM, kills)
    assert found.any_role.is_enough, "all roles together have enough"
    (problem,) = found.problems(needs_all=True)
    assert problem.startswith("hybrid: 1.00 answers/s")
    assert [line.partition(":")[0] for line in str(found).splitlines()] == ["prefill", "decode", "hybrid"]


def test_role_that_was_not_measured_is_a_problem_only_in_a_run_that_needs_all_roles() -> None:
    records = [*BEFORE, *(answered_at(20 + i / 10) for i in range(400))]
    found = measure(records, CALM, [observed("kill", "p0", 20.0, 40.0), observed("kill", "d0", 40.0, 55.0)])
    assert found.problems(needs_all=False) == []
    assert [text.split()[2] for text in found.problems(needs_all=True)] == ["decode:", "hybrid:"]
    short = measure(records, CALM, [observed("kill", "p0", 20.0, 32.0), observed("kill", "d0", 32.0, 44.0)])
    assert short.problems(needs_all=False) == [], "their times are judged together"
    assert len(measure(records, CALM, []).problems(needs_all=False)) == 1


def test_runs_of_twenty_minutes_need_all_roles() -> None:
    assert [Options.sized(60.0 * m, seed=1).needs_all_roles for m in (3, 10, 20, 30)] == [False, False, True, True]
    assert not Options.sized(1800.0, seed=1, kinds=("pause",)).needs_all_roles


def test_goodput_without_answers_outside_of_faults_is_not_measured() -> None:
    nothing_before = measure([answered_at(30.0)], CALM, [observed("kill", "d0", 20.0, 60.0)])
    assert not role(nothing_before, "decode").is_measured


def test_times_between_faults_count_as_undisturbed() -> None:
    records = [*BEFORE, *(answered_at(40 + i / 2) for i in range(20))]  # two a second from 40 s to 50 s
    kills = [
        observed("kill", "d0", 20.0, 37.0),
        observed("pause", "p0", 25.0, 30.0),
        observed("kill", "d0", 50.0, 60.0),
    ]
    decode = role(measure(records, CALM, kills), "decode")
    assert (decode.without, decode.without_s) == ((100 + 20) / 20, 20.0)
