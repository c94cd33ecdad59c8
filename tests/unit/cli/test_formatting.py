import pytest

from baton.cli.formatting import seconds, size, speed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.00291, "2.9 ms"),
        (0.0313, "31 ms"),
        (0.42, "420 ms"),
        (1.2345, "1.23 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_seconds_are_formatted(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1000, "1000 B"), (49_152, "48 KiB"), (1023 * 1024, "1,023 KiB"), (1.5 * 2**30, "1.5 GiB")],
)
def test_sizes_are_formatted(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(5.83e9, "5.8 GB/s"), (18.2e9, "18 GB/s"), (150e9, "150 GB/s"), (2.5e6, "2.5 MB/s")]
)
def test_speeds_are_formatted(value: float, text: str) -> None:
    assert speed(value) == text
