import pytest

from baton.runtime.config.byte_sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        (" 512 mib ", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("64Gi", 64 * 2**30),
        ("1.5KiB", 1536),
        ("8.388608e+06", 8388608),
        ("9007199254740993", 9007199254740993),  # would lose precision as a float
    ],
)
def test_sizes_are_parsed(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "12XB", "1 2", "0.3B", "1e-3", "infinity", "1e400", "1e308TB"])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 1024, 8 * 2**20, 3 * 2**30 + 1, 2**40])
def test_formatted_size_is_parsed_to_the_same_value(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes)) == num_bytes
