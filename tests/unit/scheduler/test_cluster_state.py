"""Cluster state: reports, epochs, reservations and TPOT SLOs."""

from typing import Any

from baton.core.cluster.placement import Placement
from baton.core.ids import DecisionId
from baton.core.messages.jobs import PrefixSource
from baton.core.request import Slo
from baton.core.step_cost import attended_tokens
from baton.scheduler.state.cluster_state import ClusterState
from tests.builders import layout, query, worker_ref, worker_report


def a_view(**limits: int) -> ClusterState:
    view = ClusterState(silence_s=1.0, reservation_s=5.0, **limits)
    view.update(worker_report("p", "prefill"), 0.0)
    view.update(worker_report("d", "decode"), 0.0)
    return view


def placement(decision_id: str = "1", **changes: Any) -> Placement:
    fields: dict[str, Any] = {
        "scheduler_id": "s",
        "policy": "least_loaded",
        "prefill": worker_ref("p"),
        "decode": worker_ref("d"),
    }
    return Placement(decision_id=DecisionId(decision_id), **(fields | changes))


def test_placement_is_reserved_immediately_on_both_sides() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(num_prompt_tokens=40), placement(), 0.0)
    d, p = view.snapshot(0.0).workers
    assert (p.reserved_seqs, p.reserved_prefill_tokens, p.reserved_blocks) == (1, 40, 10)
    assert (d.reserved_seqs, d.reserved_prefill_tokens, d.reserved_blocks) == (1, 0, 10)


def test_reservation_ends_when_the_worker_counts_it() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    view.update(worker_report("p", "prefill", report_seq=2), 0.1)
    assert view.snapshot(0.1).workers[1].reserved_seqs == 1
    view.update(worker_report("p", "prefill", report_seq=3, counted_decision_ids=(DecisionId("1"),)), 0.2)
    d, p = view.snapshot(0.2).workers
    assert (p.reserved_seqs, d.reserved_seqs) == (0, 1), "each side counts separately"


def test_uncounted_reservation_expires() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    for now_s in (2.0, 4.0, 6.0):
        view.update(worker_report("p", "prefill", report_seq=int(now_s * 10)), now_s)
        view.update(worker_report("d", "decode", report_seq=int(now_s * 10)), now_s)
    assert [w.reserved_seqs for w in view.snapshot(6.0).workers] == [0, 0]


def test_silent_worker_is_removed() -> None:
    view = a_view()
    view.update(worker_report("p", "prefill", report_seq=2), 1.5)
    assert [w.worker_id for w in view.snapshot(2.0).workers] == ["p"]


def test_older_report_is_ignored() -> None:
    view = a_view()
    assert view.update(worker_report("p", "prefill", report_seq=5, running_seqs=3), 0.0)
    assert not view.update(worker_report("p", "prefill", report_seq=4, running_seqs=9), 0.0)
    assert view.snapshot(0.0).workers[1].report.running_seqs == 3


def test_new_epoch_replaces_the_old_one_and_its_reservations() -> None:
    view = a_view()
    view.reserve(DecisionId("1"), query(), placement(), 0.0)
    assert view.update(worker_report("p", "prefill", epoch=2, report_seq=1), 0.1)
    assert view.snapshot(0.1).workers[1].reserved_seqs == 0
    assert not view.remove(worker_ref("p", epoch=1)), "the end of the old epoch's stream must not remove the new epoch"
    assert view.remove(worker_ref("p", epoch=2))


def test_only_what_must_be_computed_and_read_is_reserved() -> None:
    view, block_bytes = a_view(), layout().block_bytes
    source = PrefixSource(worker=worker_ref("d"), num_blocks=7)
    view.reserve(
        DecisionId("1"),
        query(num_prompt_tokens=40, sample_count=2),
        placement(prefix_source=source, prefill_overlap_blocks=2, decode_overlap_blocks=6),
        0.0,
    )
    d, p = view.snapshot(0.0).workers
    assert (p.reserved_prefill_tokens, p.reserved_attended_tokens) == (12, attended_tokens(12, 28))
    assert (p.reserved_link_bytes, p.reserved_context_tokens) == ({"d": 5 * block_bytes}, 0)
    assert (d.reserved_link_bytes, d.reserved_context_tokens, d.reserved_prefill_tokens) == (
        {"p": 4 * block_bytes},
        80,
        0,
    )
    view.reserve(
        DecisionId("2"), query(num_prompt_tokens=40), placement("2", prefill=None, decode_overlap_blocks=6), 0.0
    )
    d = view.snapshot(0.0).workers[0]
    assert (d.reserved_prefill_tokens, d.reserved_link_bytes) == (16, {"p": 4 * block_bytes})
    for decision_id in ("1", "2"):
        view.release(DecisionId(decision_id), ("p", "d"))
    assert view.snapshot(0.0).workers == a_view().snapshot(0.0).workers, "no reservation is left"


def test_strictest_tpot_slo_counts_until_its_request_has_ended() -> None:
    view = a_view()
    for decision_id, tpot_s in (("1", 0.05), ("2", 0.03), ("3", None)):
        view.reserve(DecisionId(decision_id), query(slo=Slo(tpot_s=tpot_s)), placement(decision_id), 0.0)
    counted = tuple(DecisionId(each) for each in "123")
    view.update(worker_report("d", "decode", report_seq=2, counted_decision_ids=counted), 0.1)
    d, p = view.snapshot(0.1).workers
    assert (d.reserved_seqs, d.tpot_slo_s, p.tpot_slo_s) == (0, 0.03, None)
    view.release(DecisionId("2"), ("p", "d"))
    assert view.snapshot(0.1).workers[0].tpot_slo_s == 0.05
    view.update(worker_report("d", "decode", epoch=2), 0.2)
    assert view.snapshot(0.2).workers[0].tpot_slo_s is None, "its requests ended with the epoch"


def test_tpot_slo_expires_with_the_deadline() -> None:
    view = ClusterState(silence_s=1e9, reservation_s=5.0)
    view.update(worker_report("d", "decode"), 0.0)
    view.reserve(DecisionId("1"), query(slo=Slo(tpot_s=0.03), deadline_s=60.0), placement(prefill=None), 0.0)
    assert view.snapshot(59.0).workers[0].tpot_slo_s == 0.03
    assert view.snapshot(61.0).workers[0].tpot_slo_s is None


def test_reservations_and_tpot_slos_are_bounded() -> None:
    view = a_view(max_reservations=4, max_tpot_slos=2)
    for number in range(9):
        view.reserve(DecisionId(str(number)), query(slo=Slo(tpot_s=0.01 * (number + 1))), placement(str(number)), 0.0)
    d, p = view.snapshot(0.0).workers
    assert d.reserved_seqs + p.reserved_seqs == 4
    assert d.tpot_slo_s == 0.08


def test_stall_of_the_scheduler_does_not_remove_workers() -> None:
    awake_s = 0.0
    state = ClusterState(silence_s=1.0, reservation_s=5.0, awake_clock=lambda: awake_s)
    state.update(worker_report("p", "prefill"), 0.0)
    awake_s = 0.9
    assert state.snapshot(100.0).workers
    awake_s = 1.1
    assert not state.snapshot(100.2).workers
