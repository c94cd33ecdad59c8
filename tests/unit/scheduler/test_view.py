"""Reports, lives and reservations: what is counted, and exactly until when."""

from baton.core.cluster import Placement
from baton.core.ids import DecisionId
from baton.scheduler.view import ClusterView
from tests.builders import query, worker_ref, worker_report


def a_view() -> ClusterView:
    view = ClusterView(silence_s=1.0, reservation_s=5.0)
    view.take_report(worker_report("p", "prefill"), 0.0)
    view.take_report(worker_report("d", "decode"), 0.0)
    return view


def placement(decision_id: str = "1") -> Placement:
    return Placement(
        decision_id=DecisionId(decision_id), scheduler_id="s", policy="least_loaded", prefill=worker_ref("p"), decode=worker_ref("d")
    )


def test_a_placement_counts_at_once_on_both_sides() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(num_prompt_tokens=40), placement(), 0.0)
    d, p = view.snapshot(0.0).workers
    assert (p.reserved_seqs, p.reserved_prefill_tokens, p.reserved_blocks) == (1, 40, 10)
    assert (d.reserved_seqs, d.reserved_prefill_tokens, d.reserved_blocks) == (1, 0, 10)


def test_a_reservation_ends_when_the_worker_counts_it_and_no_sooner() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    view.take_report(worker_report("p", "prefill", report_seq=2), 0.1)
    assert view.snapshot(0.1).workers[1].reserved_seqs == 1
    view.take_report(worker_report("p", "prefill", report_seq=3, counted_decision_ids=(DecisionId("1"),)), 0.2)
    d, p = view.snapshot(0.2).workers
    assert (p.reserved_seqs, d.reserved_seqs) == (0, 1), "each side counts for itself"


def test_a_reservation_that_nobody_counts_ends_by_itself() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    for now_s in (2.0, 4.0, 6.0):
        view.take_report(worker_report("p", "prefill", report_seq=int(now_s * 10)), now_s)
        view.take_report(worker_report("d", "decode", report_seq=int(now_s * 10)), now_s)
    assert [w.reserved_seqs for w in view.snapshot(6.0).workers] == [0, 0]


def test_a_silent_worker_is_gone() -> None:
    view = a_view()
    view.take_report(worker_report("p", "prefill", report_seq=2), 1.5)
    assert [w.worker_id for w in view.snapshot(2.0).workers] == ["p"]


def test_old_reports_change_nothing() -> None:
    view = a_view()
    assert view.take_report(worker_report("p", "prefill", report_seq=5, running_seqs=3), 0.0)
    assert not view.take_report(worker_report("p", "prefill", report_seq=4, running_seqs=9), 0.0)
    assert view.snapshot(0.0).workers[1].report.running_seqs == 3


def test_a_new_life_replaces_the_old_one_and_its_reservations() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    assert view.take_report(worker_report("p", "prefill", epoch=2, report_seq=1), 0.1)
    assert view.snapshot(0.1).workers[1].reserved_seqs == 0
    assert not view.lose(worker_ref("p", epoch=1)), "the end of the old life's stream must not remove the new life"
    assert view.lose(worker_ref("p", epoch=2))
