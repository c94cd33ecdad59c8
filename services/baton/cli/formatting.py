"""Formats numbers and tables for the terminal."""

import sys

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200
"""Width of output that does not go to a terminal, wide enough for one line per table row."""

_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def console(*, is_error: bool = False) -> Console:
    """Return a console on the current standard output, or on standard error."""
    stream = sys.stderr if is_error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=False)


def table(*columns: str, title: str | None = None) -> Table:
    """Create a table without borders; a column whose name begins with `>` is right-aligned."""
    result = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title=title,
        title_justify="left",
        title_style="bold",
        show_edge=False,
    )
    for column in columns:
        result.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=column.startswith(">"),
        )
    return result


def seconds(value: float) -> str:
    """Format seconds such as `0.4 ms`, `31 ms` or `1.24 s`."""
    if value >= 1:
        return f"{_digits(value, 3)} s"
    return f"{_digits(value * 1000, 2)} ms"


def size(num_bytes: float) -> str:
    """Format bytes such as `48 KiB` or `1.5 GiB`."""
    for unit, factor in _SIZES:
        if num_bytes >= factor:
            return f"{_digits(num_bytes / factor, 3)} {unit}"
    return f"{num_bytes:.0f} B"


def speed(bytes_per_s: float) -> str:
    """Format bytes per second such as `5.8 GB/s`, in powers of 1000 as usual for links."""
    return f"{_digits(bytes_per_s / 1e9, 2)} GB/s" if bytes_per_s >= 1e8 else f"{_digits(bytes_per_s / 1e6, 2)} MB/s"


def _digits(value: float, count: int) -> str:
    """Format with `count` significant digits and without an exponent; larger integers keep all digits."""
    return f"{value:.{count}g}" if 1e-4 <= value < 10**count - 0.5 else f"{value:,.0f}"
