"""Parses and formats byte sizes such as `512MiB`, `2GB`, `64Gi` and `4096`."""

import math
import re

MIB = 2**20
_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KI": 2**10,
    "KIB": 2**10,
    "MI": 2**20,
    "MIB": 2**20,
    "GI": 2**30,
    "GIB": 2**30,
    "TI": 2**40,
    "TIB": 2**40,
}
SIZE_PATTERN = r"^\s*\d+(\.\d+)?([eE]\+?\d+)?\s*([KkMmGgTt]([Ii])?)?[Bb]?\s*$"
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Parse a byte size: `MiB` and `Mi` are powers of 1024, `MB` and `M` powers of 1000.

    Raises ValueError if the text is not a size, or not an integral number of bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match["unit"].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 2GB or 4096")
    number = match["number"]
    size = int(number) * factor if number.isdecimal() else float(number) * factor
    if not math.isfinite(size) or size != int(size):
        raise ValueError(f"{text!r} is not an integral number of bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Format a byte count exactly, in the largest binary unit that divides it: 8388608 is `8MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.upper()]
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
