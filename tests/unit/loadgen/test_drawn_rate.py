"""The statement that explains rate and number of requests."""

from typing import Any

import pytest

from loadgen.plan.drawn_rate import offered_text
from tests.unit.loadgen.plans import plan, request

THREE = [request(i, (i, 8)) for i in range(3)]


@pytest.mark.parametrize(
    ("made_by", "text"),
    [
        ({"rate": "4", "seconds": 30.0}, "rate 4 offered 3 requests in 30 s (Poisson draw; 120 on average)"),
        (
            {"rate": "4", "seconds": 1.5, "gaps": "gamma:cv=2"},
            "rate 4 offered 3 requests in 1.5 s (gamma:cv=2 draw; 6 on average)",
        ),
        ({"rate": "2", "seconds": 1.5, "gaps": "constant"}, "rate 2 offered 3 requests in 1.5 s"),
        ({"rate": "ramp:1-9@9s", "seconds": 9}, "rate ramp:1-9@9s offered 3 requests in 9 s (Poisson draw)"),
        ({"rate": "4", "requests": 3}, ""),
        ({"rate": "4", "seconds": 30.0, "requests": 3}, ""),
        ({"source": "azure", "seconds": 30.0}, ""),
    ],
)
def test_statement_names_rate_time_and_draw(made_by: dict[str, Any], text: str) -> None:
    assert offered_text(plan(*THREE, made_by=made_by)) == text


def test_rate_of_sessions_counts_sessions() -> None:
    turns = plan(
        request(0, (0, 8), session="a"),
        request(1, (0, 8), 0, session="a", turn=1, after=0),
        made_by={"rate": "1", "seconds": 2},
    )
    assert offered_text(turns, "planned") == (
        "rate 1 planned 1 session with 2 requests in 2 s (Poisson draw; 2 on average)"
    )
