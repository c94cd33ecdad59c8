"""The schedule: due times, distribution over processes, and sessions with an incomplete turn."""

from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.plan import PlannedRequest
from loadgen.plan.schedule import Schedule, peak_rates, share
from tests.unit.loadgen.plans import request


def session(first: int, turns: int, name: str, think_s: float = 1.0) -> list[PlannedRequest]:
    planned = [request(first, (first, 4), session=name, at_s=float(first))]
    return planned + [
        request(
            first + turn,
            (first, 4),
            first + turn - 1,
            (first, 2),
            session=name,
            turn=turn,
            after=first + turn - 1,
            think_s=think_s,
        )
        for turn in range(1, turns)
    ]


def due(schedule: Schedule, now_s: float) -> list[tuple[float, int]]:
    return [(at_s, request.index) for at_s, request in schedule.take_due(now_s)]


def test_planned_times_never_move() -> None:
    schedule = Schedule([request(index, (index, 4), at_s=index / 10) for index in range(5)])
    assert (schedule.next_s, due(schedule, -1.0)) == (0.0, [])
    assert due(schedule, 0.25) == [(0.0, 0), (0.1, 1), (0.2, 2)]
    assert schedule.next_s == 0.3
    assert due(schedule, 100.0) == [(0.3, 3), (0.4, 4)]
    assert (schedule.next_s, schedule.num_unsent) == (None, 0)


def test_later_turn_is_due_a_think_time_after_the_previous_end() -> None:
    schedule = Schedule([*session(0, 3, "s", think_s=2.5), request(3, (9, 4), at_s=4.0)])
    assert due(schedule, 1.0) == [(0.0, 0)]
    assert schedule.ended(0, 1.25, is_complete=True) == []
    assert schedule.next_s == 3.75
    assert due(schedule, 5.0) == [(3.75, 1), (4.0, 3)]
    assert schedule.num_unsent == 1
    schedule.ended(1, 6.0, is_complete=True)
    assert due(schedule, 9.0) == [(8.5, 2)]
    assert schedule.num_unsent == 0


def test_incomplete_response_drops_later_turns() -> None:
    schedule = Schedule(session(0, 4, "s", think_s=1.0))
    due(schedule, 0.0)
    schedule.ended(0, 1.0, is_complete=True)
    due(schedule, 2.0)
    dropped = schedule.ended(1, 5.0, is_complete=False)
    assert [(at_s, request.index) for at_s, request in dropped] == [(6.0, 2), (7.0, 3)]
    assert (schedule.next_s, schedule.num_unsent) == (None, 0)


def test_upcoming_returns_each_request_once_before_it_is_sent() -> None:
    schedule = Schedule([request(index, (index, 4), at_s=float(index)) for index in range(4)] + session(4, 2, "s"))
    first = schedule.upcoming(0.5)
    assert first is not None
    assert (first.index, schedule.upcoming(0.5)) == (0, None)
    due(schedule, 4.5)
    assert schedule.upcoming(9.0) is None
    schedule.ended(4, 5.0, is_complete=True)
    due(schedule, 6.0)  # before the turn is ready
    assert schedule.upcoming(9.0) is None


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0, 10), max_size=10), st.floats(0, 12))
def test_num_due_counts_released_turns(times: list[float], ends: list[float], until_s: float) -> None:
    requests = [request(index, (index, 4), at_s=at_s) for index, at_s in enumerate(sorted(times))]
    first = len(requests)
    for index in range(len(ends)):
        requests += [
            request(first + 2 * index, (1, 4), at_s=10.0, session=str(index)),
            request(first + 2 * index + 1, (1, 4), after=first + 2 * index, session=str(index), turn=1),
        ]
    schedule = Schedule(requests)
    for index, at_s in enumerate(ends):
        schedule.ended(first + 2 * index, at_s, is_complete=True)
    expected = sum(1 for at_s in [*times, *ends] if at_s <= until_s) + (len(ends) if until_s >= 10.0 else 0)
    assert schedule.num_due(until_s) == expected == len(schedule.take_due(until_s))


@given(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=12))
def test_share_covers_all_requests_and_keeps_sessions_together(parts: int, sizes: list[int]) -> None:
    requests: list[PlannedRequest] = []
    for number, turns in enumerate(sizes):
        requests += session(len(requests), turns, f"s{number}" if turns > 1 else "")
    shares = [share(requests, part, parts) for part in range(parts)]
    assert sorted(request.index for one in shares for request in one) == list(range(len(requests)))
    for one in shares:
        mine = {request.index for request in one}
        assert all(request.after in mine for request in one if request.after is not None)
    if len(sizes) >= parts:
        assert all(shares)


def test_peak_rates_are_those_of_the_busiest_window() -> None:
    quiet = [request(index, (index, 4), at_s=float(index), output=10) for index in range(20)]
    burst = [request(20 + index, (index, 4), at_s=20.0 + index / 10, output=10) for index in range(50)]
    requests_per_s, tokens_per_s = peak_rates([*quiet, *burst])
    assert (requests_per_s, tokens_per_s) == (10.0, 100.0)
    assert peak_rates([]) == (0.0, 0.0)
    with_turns = session(0, 2, "a")
    assert peak_rates(with_turns)[0] == 2.0
