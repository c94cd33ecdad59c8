"""Records as they are being written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.measure.records import Record
from loadgen.measure.records_file import from_json


class RecordTail:
    """Of files that others append to, each line by one write. What has been read is not read again."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._read = dict.fromkeys(files, 0)
        self._records: list[Record] = []

    def read(self) -> Sequence[Record]:
        """All whole lines so far; a file may not be there yet."""
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
