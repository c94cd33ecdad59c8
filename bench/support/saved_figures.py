"""Figures of a bench that takes long, in a file: one that was stopped goes on where it was."""

import json
import shutil
from collections import UserDict
from pathlib import Path
from typing import Any


class SavedFigures(UserDict[str, Any]):
    """By name, in a JSON file from the moment of their assignment."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.data = json.loads(file.read_text()) if file.exists() else {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        beside.replace(self._file)


def emptied(directory: Path) -> Path:
    """For results: without what a stopped bench has left there. Its parents exist."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    return directory
