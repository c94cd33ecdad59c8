"""Reads files that the user names, plain or gzipped (detected by content). Every error names the file."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loadgen.loadgen_errors import BadPlan


@contextmanager
def open_bytes(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a stream of the file's uncompressed bytes. Raises BadPlan, also for errors while reading."""
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.peek(2)[:2] == b"\x1f\x8b"
            if is_gzip:
                with gzip.GzipFile(fileobj=raw) as file, io.BufferedReader(file) as buffered:
                    yield buffered
            else:
                yield raw
    except FileNotFoundError:
        raise BadPlan(f"{path}: no such file") from None
    except EOFError:
        raise BadPlan(f"{path}: the gzip file is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise BadPlan(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        raise BadPlan(f"{path}: cannot be read ({error.strerror or error})") from None


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line as UTF-8 without its end). Raises BadPlan."""
    with open_bytes(path) as file:
        number = 0
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise BadPlan(
                    f"{path}:{number}: not UTF-8 text ({error.reason} at byte {error.start + 1} of the line)"
                ) from None


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of the file's uncompressed bytes, in hex."""
    digest = hashlib.sha256()
    with open_bytes(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
