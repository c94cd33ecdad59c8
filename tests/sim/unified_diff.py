"""Applies a patch file to a folder, without any tool: every line of context must match."""

import re
from collections.abc import Iterator
from pathlib import Path

_FILE = re.compile(r"^--- a/(.+)\n\+\+\+ b/\1\n", re.MULTILINE)
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*\n", re.MULTILINE)


class PatchFailed(Exception):
    """A patch does not fit to the files. Make it again for the present code."""


def apply_patch(patch: str, root: Path) -> list[str]:
    """Apply a patch to the files below `root`, and return their paths. Raises PatchFailed."""
    parts = _FILE.split(patch)[1:]
    paths = parts[::2]
    if not paths:
        raise PatchFailed("the patch names no file")
    for path, hunks in zip(paths, parts[1::2], strict=True):
        file = root / path
        file.write_text(_patched(file.read_text(encoding="utf-8"), hunks, path), encoding="utf-8")
    return paths


def _patched(text: str, hunks: str, path: str) -> str:
    for before, after in _hunks(hunks):
        if text.count(before) != 1:
            raise PatchFailed(f"{path}: these lines occur {text.count(before)} times:\n{before}")
        text = text.replace(before, after)
    return text


def _hunks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (lines before, lines after) of each hunk. Line numbers are not used: the code around may move."""
    for body in _HUNK.split(text)[2::2]:
        lines = body.splitlines(keepends=True)
        yield (
            "".join(line[1:] for line in lines if line[0] in " -"),
            "".join(line[1:] for line in lines if line[0] in " +"),
        )
