"""One a role at a time: who may leave, and when the next one may."""

from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.scheduler.state.worker_replacement import WorkerReplacement
from tests.builders import worker_report

SETTLE_S, MAX_WAIT_S = 1.0, 20.0
READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


def decode(
    worker_id: str, *, epoch: int = 1, needs_replacement: bool = True, state: WorkerState = READY
) -> WorkerReport:
    return worker_report(worker_id, "decode", epoch=epoch, needs_replacement=needs_replacement, state=state)


def leaving() -> WorkerReplacement:
    return WorkerReplacement(settle_s=SETTLE_S, max_wait_s=MAX_WAIT_S)


def chosen(of: WorkerReplacement, now_s: float, *reports: WorkerReport) -> list[str]:
    return [str(worker.worker_id) for worker in of.choose(reports, now_s)]


def test_nobody_leaves_who_does_not_ask() -> None:
    of = leaving()
    for now_s in (0.0, 5.0, 50.0):
        assert chosen(of, now_s, decode("d0", needs_replacement=False), decode("d1", needs_replacement=False)) == []


def test_a_wish_must_have_stood_so_that_every_scheduler_has_heard_of_all() -> None:
    of = leaving()
    assert chosen(of, 0.0, decode("d1")) == []
    assert chosen(of, 0.9, decode("d1"), decode("d0")) == []
    assert chosen(of, 1.5, decode("d1", needs_replacement=False), decode("d0")) == [], (
        "it has taken its wish back, and d0 has asked for 0.6 s only"
    )
    assert chosen(of, 2.0, decode("d1"), decode("d0")) == ["d0"]


def test_two_schedulers_choose_the_same() -> None:
    first, second = leaving(), leaving()
    reports = (decode("d0"), decode("d1"), decode("d2"))
    first.choose(reports, 0.0)
    second.choose(reports[::-1], 0.3)
    assert chosen(first, 1.2, *reports) == chosen(second, 1.4, *reports[::-1]) == ["d0"]


def test_the_next_one_leaves_when_the_one_before_has_been_replaced() -> None:
    of = leaving()
    of.choose((decode("d0"), decode("d1")), 0.0)
    assert chosen(of, 1.0, decode("d0"), decode("d1")) == ["d0"]
    assert chosen(of, 1.1, decode("d0"), decode("d1")) == ["d0"], "it has not heard it yet"
    assert chosen(of, 1.2, decode("d0", state=DRAINING), decode("d1")) == []
    assert chosen(of, 60.0, decode("d0", state=DRAINING), decode("d1")) == [], "however long it takes"
    assert chosen(of, 61.0, decode("d1")) == []
    assert chosen(of, 70.0, decode("d1")) == []
    assert chosen(of, 71.0, decode("d0", epoch=2, needs_replacement=False), decode("d1")) == ["d1"]


def test_a_successor_may_have_another_name() -> None:
    of = leaving()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 2.0, decode("d1"), decode("worker-7", needs_replacement=False)) == ["d1"]


def test_a_successor_that_never_comes_is_not_waited_for_for_ever() -> None:
    of = leaving()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 2.0, decode("d1")) == []
    assert chosen(of, 2.0 + MAX_WAIT_S - 0.1, decode("d1")) == []
    assert chosen(of, 2.0 + MAX_WAIT_S, decode("d1")) == ["d1"]


def test_whose_memory_comes_back_before_it_went_keeps_nobody_waiting() -> None:
    of = leaving()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 1.1, decode("d0", needs_replacement=False), decode("d1")) == ["d1"]


def test_one_that_drains_for_another_reason_goes_first() -> None:
    of = leaving()
    of.choose((decode("d0", needs_replacement=False), decode("d1")), 0.0)
    assert chosen(of, 2.0, decode("d0", needs_replacement=False, state=DRAINING), decode("d1")) == []
    assert chosen(of, 3.0, decode("d1")) == ["d1"]


def test_roles_do_not_wait_for_each_other() -> None:
    of = leaving()
    prefill = worker_report("p0", "prefill", needs_replacement=True)
    of.choose((decode("d0"), prefill), 0.0)
    assert sorted(chosen(of, 1.0, decode("d0"), prefill)) == ["d0", "p0"]


def test_the_only_one_of_its_role_may_leave_too() -> None:
    of = leaving()
    of.choose((decode("d0"),), 0.0)
    assert chosen(of, 1.0, decode("d0")) == ["d0"]
