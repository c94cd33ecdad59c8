"""Sizes in bytes as people write them: `512MiB`, `2GB`, `64Gi`, `4096`."""

import re

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
    """Bytes in `text`. `MiB` and `Mi` are powers of 1024, `MB` and `M` of 1000. Raises ValueError for
    anything else, and for a fraction of a byte."""
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match["unit"].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 2GB or 4096")
    number = match["number"]
    size = int(number) * factor if number.isdecimal() else float(number) * factor
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """The shortest exact form that `parse_size` reads back: 8388608 is `8MiB`, 1000 is `1000`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.upper()]
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)
