"""Counts that processes exchange, and their live display."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.counts import Counts, LagHistogram
from loadgen.send.run.live import LiveView, attainment

LAGS = st.lists(st.floats(0, 100), min_size=1, max_size=200)


def histogram(lags: list[float]) -> LagHistogram:
    result = LagHistogram()
    for lag in lags:
        result.add(lag)
    return result


@given(LAGS, st.integers(1, 100))
def test_percentile_is_exact_to_within_a_bucket(lags: list[float], q: int) -> None:
    exact = sorted(lags)[max(0, -(-len(lags) * q // 100) - 1)]
    found = histogram(lags).percentile(q)
    assert found is not None
    assert exact * (1 - 1e-9) <= found <= max(exact * 1.16, 1.2e-5)


@given(LAGS, LAGS)
def test_histograms_add_up_after_a_json_round_trip(one: list[float], other: list[float]) -> None:
    total = LagHistogram.from_json(json.loads(json.dumps(histogram(one).to_json())))
    total += histogram(other)
    combined = histogram([*one, *other])
    assert (total.to_json(), total.count) == (combined.to_json(), combined.count)


def counts(good: int, late: int, due: int) -> Counts:
    result = Counts()
    result.due, result.sent, result.in_flight = due, due, due - good - late
    result.outcomes.update({"good": good, "late": late})
    result.errors.update({"timeout": late})
    result.lags.add(0.001)
    return result


def test_counts_of_processes_add_up() -> None:
    total = Counts()
    for part in (counts(3, 1, 6), counts(5, 0, 5)):
        total += Counts.from_json(json.loads(json.dumps(part.to_json())))
    assert (total.due, total.sent, total.in_flight, total.ended, total.outcomes["good"]) == (11, 11, 2, 9, 8)
    assert (total.errors["timeout"], total.lags.count, attainment(total)) == (1, 2, "88.9% of 9 ended")
    assert attainment(Counts()) == "-"


def test_live_view_prints_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(name="plan", url="http://x", num_requests=20, planned_s=10.0, lag_limit_s=0.002) as view:
        view.phase("running")
        view.update(counts(3, 1, 6), 1.0)
        view.update(counts(3, 1, 7), 1.2)  # too soon for another line
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert shown[1].endswith(
        "1 s  due 6/20  in flight 2  good 3  late 1  SLO attainment 75.0% of 4 ended  send lag p99 1.00 ms"
    )


def test_live_panel_warns_of_an_invalid_run() -> None:
    from rich.console import Console

    view = LiveView(name="plan", url="http://x", num_requests=20, planned_s=10.0, lag_limit_s=0.0005, is_quiet=True)
    view.update(counts(3, 1, 6), 1.0)
    console = Console(width=120, record=True, file=None, force_terminal=True)
    with console.capture() as capture:
        console.print(view._picture())
    assert "the run will be INVALID" in capture.get()
    assert "1 × timeout" in capture.get()


def test_live_panel_shows_recent_rates() -> None:
    """In two seconds 10 requests were due, 8 were sent and 6 completed."""
    from rich.console import Console

    view = LiveView(name="plan", url="http://x", num_requests=20, planned_s=10.0, lag_limit_s=0.002, is_quiet=True)
    for elapsed_s, due, sent, ended in ((0.5, 0, 0, 0), (1.0, 4, 4, 3), (3.0, 14, 12, 9)):
        shown_counts = Counts()
        shown_counts.due, shown_counts.sent, shown_counts.in_flight = due, ended, sent - ended
        shown_counts.outcomes.update({"good": ended})
        view.update(shown_counts, elapsed_s + 5.0 * (elapsed_s > 0.5))  # the first is forgotten
    console = Console(width=120, record=True, file=None, force_terminal=True)
    with console.capture() as capture:
        console.print(view._picture())
    assert "offered 5.0/s, achieved 4.0/s, completed 3.0/s, in flight 3" in capture.get()


def test_quiet_view_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(
        name="plan", url="http://x", num_requests=20, planned_s=10.0, lag_limit_s=0.002, is_quiet=True
    ) as view:
        view.phase("running")
        view.update(counts(3, 1, 6), 1.0)
    assert capsys.readouterr().err == ""
