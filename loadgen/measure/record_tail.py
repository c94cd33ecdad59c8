"""Reads records while they are being written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.measure.records import Record
from loadgen.measure.records_file import from_json


class RecordTail:
    """Reads files that other processes append to, one line per write. Each part is read only once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._read = dict.fromkeys(files, 0)
        self._records: list[Record] = []

    def read(self) -> Sequence[Record]:
        """Return all complete records so far. Files that do not exist yet are skipped."""
        for path, done in self._read.items():
            try:
                with path.open("rb") as file:
                    file.seek(done)
                    data = file.read()
            except FileNotFoundError:
                continue
            lines = data[: data.rfind(b"\n") + 1]
            self._records += [from_json(json.loads(line)) for line in lines.splitlines() if line.strip()]
            self._read[path] = done + len(lines)
        return self._records
