"""Reads the repository's own files for the checks: which exist, and their syntax trees."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("services/baton/v1/", "services/baton/wire/v1/")
PACKAGES = ("services/", "loadgen/", "bench/", "tools/", "tests/")


@dataclass(frozen=True)
class Source:
    """One Python file. `path` is relative to the repository."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


@dataclass(frozen=True)
class Repository:
    """The files of a checkout, or of a directory that a test made. Generated code is left out."""

    root: Path = ROOT
    paths: list[str] = field(default_factory=list)

    @staticmethod
    def open(root: Path = ROOT) -> "Repository":
        """Tracked files and new files that git does not ignore; without git, every file below `root`."""
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, check=False)
        if listed.returncode == 0:
            names = [name for name in listed.stdout.decode().split("\0") if name]
        else:
            hidden = (".venv/", "build/", "node_modules/")
            names = [str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()]
            names = [name for name in names if not name.startswith(hidden) and "__pycache__" not in name]
        kept = sorted({name for name in names if not name.startswith(GENERATED) and (root / name).is_file()})
        return Repository(root, kept)

    def python(self, *prefixes: str) -> Iterator[Source]:
        """Python files below these folders; below all code folders if none is named."""
        for path in self.paths:
            if path.endswith(".py") and path.startswith(prefixes or PACKAGES):
                yield Source(path, self.read(path))

    def matching(self, *suffixes: str) -> Iterator[str]:
        """Paths with one of these suffixes."""
        return (path for path in self.paths if path.endswith(suffixes))

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")
