"""Goodput with one worker down counts only times in which nothing else was disturbed."""

from tests.nemesis.goodput import Observed, measure
from tests.nemesis.history import End, Interval, Record
from tests.nemesis.plan import Fault


def answered_at(end_s: float) -> Record:
    record = Record(number=0, case="", way="", gateway="", begin_s=0.0, deadline_s=99.0)
    record.end(End.COMPLETE, end_s)
    return record


def observed(kind: str, target: str, begin_s: float, end_s: float) -> Observed:
    fault = Fault(kind=kind, targets=(target,), begin_s=begin_s, duration_s=1.0)
    return Observed(fault=fault, begin_s=begin_s, end_s=end_s)


def test_share_of_goodput_while_one_worker_is_down() -> None:
    records = [answered_at(i / 10) for i in range(100)]  # ten a second before 10 s
    records += [answered_at(20 + i / 4) for i in range(100)]  # four a second after 20 s
    faults = [
        observed("kill", "d0", 20.0, 30.0),
        observed("pause", "p0", 29.0, 31.0),  # overlaps, so that neither counts
        observed("kill", "p1", 32.0, 42.0),
        observed("kill_service", "gateway", 43.0, 44.0),
    ]
    found = measure(records, Interval(name="calm", begin_s=0.0, end_s=10.0), faults)
    assert (found.before, found.before_s, found.during, found.during_s) == (10.0, 10.0, 4.0, 10.0)
    assert found.share == 0.4
    assert not found.is_enough, "ten seconds are too few for a verdict"
    assert str(found).startswith("not measured: ")
    longer = [observed("kill", "d0", 20.0, 30.0), observed("kill", "p1", 30.0, 42.0)]
    slow = measure(records, Interval(name="calm", begin_s=0.0, end_s=10.0), longer)
    assert slow.is_measured
    assert not slow.is_enough
    fast = measure(records, Interval(name="calm", begin_s=20.0, end_s=30.0), longer)
    assert fast.is_enough
    assert not str(fast).startswith("not measured")


def test_goodput_without_answers_before_the_faults_is_not_measured() -> None:
    kills = [observed("kill", "d0", 20.0, 60.0)]
    nothing_before = measure([answered_at(30.0)], Interval(name="calm", begin_s=0.0, end_s=10.0), kills)
    assert not nothing_before.is_enough
