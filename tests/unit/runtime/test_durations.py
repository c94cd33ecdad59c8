import pytest

from baton.runtime.config.durations import format_duration, parse_durations


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.008, "8ms"), (1.5, "1.5s"), (60e-6, "60us"), (2e-9, "2ns"), (0.0, "0ns"), (0.001, "1ms"), (1e-6, "1us")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_named_durations_are_parsed_in_any_order() -> None:
    assert parse_durations(" b=1.5s, a = 2ms,", ("a", "b")) == {"a": pytest.approx(0.002), "b": 1.5}
    with pytest.raises(ValueError, match="with a term of a, b, got 'c=1s'"):
        parse_durations("c=1s", ("a", "b"))
