"""Keeps the figures of a long benchmark in a file, so that an interrupted run can continue."""

import json
import shutil
from collections import UserDict
from pathlib import Path
from typing import Any


class SavedFigures(UserDict[str, Any]):
    """A dictionary that is written to a JSON file at every assignment."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.data = json.loads(file.read_text()) if file.exists() else {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        new_file = self._file.with_suffix(".new")
        new_file.write_text(json.dumps(self.data, indent=1) + "\n")
        new_file.replace(self._file)


def emptied(directory: Path) -> Path:
    """Remove the directory, which may hold parts of an interrupted run, and create its parents.

    Return its path.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    return directory
