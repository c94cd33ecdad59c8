"""Workers are replaced one per role at a time."""

from baton.core.cluster.worker_report import WorkerReport, WorkerState
from baton.scheduler.state.worker_replacement import WorkerReplacement
from tests.builders import worker_report

SETTLE_S, MAX_WAIT_S = 1.0, 20.0
READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


def decode(
    worker_id: str, *, epoch: int = 1, needs_replacement: bool = True, state: WorkerState = READY
) -> WorkerReport:
    return worker_report(worker_id, "decode", epoch=epoch, needs_replacement=needs_replacement, state=state)


def replacement() -> WorkerReplacement:
    return WorkerReplacement(settle_s=SETTLE_S, max_wait_s=MAX_WAIT_S)


def chosen(of: WorkerReplacement, now_s: float, *reports: WorkerReport) -> list[str]:
    return [str(worker.worker_id) for worker in of.choose(reports, now_s)]


def test_workers_that_do_not_ask_are_not_replaced() -> None:
    of = replacement()
    for now_s in (0.0, 5.0, 50.0):
        assert chosen(of, now_s, decode("d0", needs_replacement=False), decode("d1", needs_replacement=False)) == []


def test_worker_must_have_asked_for_the_settle_time() -> None:
    of = replacement()
    assert chosen(of, 0.0, decode("d1")) == []
    assert chosen(of, 0.9, decode("d1"), decode("d0")) == []
    assert chosen(of, 1.5, decode("d1", needs_replacement=False), decode("d0")) == [], (
        "d1 no longer asks, and d0 has asked for 0.6 s only"
    )
    assert chosen(of, 2.0, decode("d1"), decode("d0")) == ["d0"]


def test_two_schedulers_choose_the_same_worker() -> None:
    first, second = replacement(), replacement()
    reports = (decode("d0"), decode("d1"), decode("d2"))
    first.choose(reports, 0.0)
    second.choose(reports[::-1], 0.3)
    assert chosen(first, 1.2, *reports) == chosen(second, 1.4, *reports[::-1]) == ["d0"]


def test_next_worker_is_replaced_after_the_one_before() -> None:
    of = replacement()
    of.choose((decode("d0"), decode("d1")), 0.0)
    assert chosen(of, 1.0, decode("d0"), decode("d1")) == ["d0"]
    assert chosen(of, 1.1, decode("d0"), decode("d1")) == ["d0"], "the command has not arrived yet"
    assert chosen(of, 1.2, decode("d0", state=DRAINING), decode("d1")) == []
    assert chosen(of, 60.0, decode("d0", state=DRAINING), decode("d1")) == [], "a drain is waited for without limit"
    assert chosen(of, 61.0, decode("d1")) == []
    assert chosen(of, 70.0, decode("d1")) == []
    assert chosen(of, 71.0, decode("d0", epoch=2, needs_replacement=False), decode("d1")) == ["d1"]


def test_replacement_may_have_another_id() -> None:
    of = replacement()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 2.0, decode("d1"), decode("worker-7", needs_replacement=False)) == ["d1"]


def test_wait_for_a_replacement_is_bounded() -> None:
    of = replacement()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 2.0, decode("d1")) == []
    assert chosen(of, 2.0 + MAX_WAIT_S - 0.1, decode("d1")) == []
    assert chosen(of, 2.0 + MAX_WAIT_S, decode("d1")) == ["d1"]


def test_recovered_worker_is_kept_and_the_next_one_replaced() -> None:
    of = replacement()
    of.choose((decode("d0"), decode("d1")), 0.0)
    of.choose((decode("d0"), decode("d1")), 1.0)
    assert chosen(of, 1.1, decode("d0", needs_replacement=False), decode("d1")) == ["d1"]


def test_replacement_waits_for_a_worker_that_drains_for_another_reason() -> None:
    of = replacement()
    of.choose((decode("d0", needs_replacement=False), decode("d1")), 0.0)
    assert chosen(of, 2.0, decode("d0", needs_replacement=False, state=DRAINING), decode("d1")) == []
    assert chosen(of, 3.0, decode("d1")) == ["d1"]


def test_roles_are_replaced_independently() -> None:
    of = replacement()
    prefill = worker_report("p0", "prefill", needs_replacement=True)
    of.choose((decode("d0"), prefill), 0.0)
    assert sorted(chosen(of, 1.0, decode("d0"), prefill)) == ["d0", "p0"]


def test_only_worker_of_its_role_is_replaced_too() -> None:
    of = replacement()
    of.choose((decode("d0"),), 0.0)
    assert chosen(of, 1.0, decode("d0")) == ["d0"]
