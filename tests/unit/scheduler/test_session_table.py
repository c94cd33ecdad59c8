"""Sessions: turns and gaps per tenant, in a table that is bounded in bytes."""

import tracemalloc
from dataclasses import replace

import pytest

from baton.core.cluster.decision_record import SessionTurn
from baton.rpc.mappers.scheduler_mapper import from_decision_record, to_decision_record
from baton.scheduler.state.session_table import SessionTable
from tests.builders import decision_record, query


def turn(table: SessionTable, at_s: float, session: str = "s", **changes: object) -> SessionTurn | None:
    return table.placed(query(session_key=session, **changes), at_s)


def test_gap_is_from_the_end_of_a_turn_to_the_arrival_of_the_next() -> None:
    table = SessionTable()
    assert turn(table, 1.0) == SessionTurn(turn=1)
    table.ended(("default", "s"), 3.0, 0.0)
    assert turn(table, 8.0, waited_s=1.0) == SessionTurn(turn=2, gap_s=4.0, median_gap_s=4.0)
    table.ended(("default", "s"), 9.0, 0.0)
    assert turn(table, 11.0) == SessionTurn(turn=3, gap_s=2.0, median_gap_s=3.0)
    table.ended(("default", "s"), 12.0, 0.0)
    assert turn(table, 12.5, waited_s=3.0) == SessionTurn(turn=4, gap_s=0.0, median_gap_s=2.0)


def test_turn_that_begins_before_the_last_one_has_ended_has_no_gap() -> None:
    table = SessionTable()
    turn(table, 1.0)
    assert turn(table, 2.0) == SessionTurn(turn=2)


def test_pause_counts_only_once() -> None:
    table = SessionTable()
    turn(table, 1.0)
    table.ended(("default", "s"), 2.0, 0.0)
    assert turn(table, 5.0) == SessionTurn(turn=2, gap_s=3.0, median_gap_s=3.0)
    assert turn(table, 9.0) == SessionTurn(turn=3, median_gap_s=3.0), "the second turn still runs"


def test_later_attempt_is_no_turn() -> None:
    table = SessionTable()
    turn(table, 1.0)
    table.ended(("default", "s"), 2.0, 0.0)
    assert turn(table, 3.0, attempt=1) == SessionTurn(turn=1)
    assert turn(table, 7.0) == SessionTurn(turn=2, gap_s=5.0, median_gap_s=5.0)


def test_tenants_have_sessions_of_their_own() -> None:
    table = SessionTable()
    turn(table, 1.0, tenant="a")
    table.ended(("a", "s"), 2.0, 0.0)
    assert turn(table, 3.0, tenant="b") == SessionTurn(turn=1)
    assert turn(table, 3.0, tenant="a") == SessionTurn(turn=2, gap_s=1.0, median_gap_s=1.0)
    table.ended(("c", "s"), 4.0, 0.0)  # unknown


def test_request_without_a_session_is_no_turn() -> None:
    table = SessionTable()
    assert table.placed(query(), 1.0) is None
    assert len(table) == 0


def test_service_of_ended_turns_adds_up() -> None:
    table = SessionTable()
    asked = query(session_key="s")
    assert table.attained_s(asked) == table.attained_s(query()) == 0.0
    for number, service_s in enumerate((2.0, 0.5)):
        turn(table, float(number))
        table.ended(("default", "s"), number + 0.5, service_s)
    assert table.attained_s(asked) == 2.5
    assert table.attained_s(query(session_key="s", tenant="other")) == 0.0
    third = turn(table, 3.0)
    assert third is not None
    assert third.attained_s == 2.5


def test_only_the_last_gaps_count() -> None:
    table = SessionTable()
    for number in range(12):
        found = turn(table, 100.0 * number)
        table.ended(("default", "s"), 100.0 * number + 100.0 - number, 0.0)
    assert found == SessionTurn(turn=12, gap_s=10.0, median_gap_s=6.5)


def test_longest_unused_sessions_are_forgotten_beyond_the_bytes() -> None:
    limit = 400_000
    table = SessionTable(limit)
    tracemalloc.start()
    for number in range(2000):
        for session in ("kept", f"{number:0128}"):
            turn(table, float(number), session, tenant=f"{number % 7:0100}" if session != "kept" else "t")
            table.ended(("t", session), number + 0.5, 0.0)
        assert table.num_bytes <= limit
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * limit < used < limit
    assert len(table) < 300
    kept = turn(table, 2000.0, "kept", tenant="t")
    assert kept is not None
    assert kept.turn == 2001


@pytest.mark.parametrize(
    "session", [None, SessionTurn(turn=1), SessionTurn(turn=2, gap_s=0.5, median_gap_s=3.0, attained_s=2.5)]
)
def test_decision_records_keep_the_session(session: SessionTurn | None) -> None:
    record = replace(decision_record(), session=session)
    assert from_decision_record(to_decision_record(record)) == record
