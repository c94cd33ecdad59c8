"""Names: no two classes and no two modules share one, and retired words are not used again.

Class and module names are unique within the product: services, loadgen and bench. Tests may repeat them.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.checks.source import Repository, Source

RETIRED = Path(__file__).with_name("retired_words.txt")
SHARED_BASENAMES = {"__init__.py", "__main__.py", "conftest.py"}
WITH_UNIQUE_NAMES = ("services/", "loadgen/", "bench/")
NATIVE = (".h", ".cpp")
MAY_QUOTE = ("CHANGELOG.md", "docs/glossary.md")
"""Pages that name retired words to explain them."""
_COMMENT_OR_STRING = re.compile(r'//.*|"(?:\\.|[^"\\\n])*"')
_NATIVE_NAME = re.compile(r"[A-Za-z_]\w*")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


def unique_classes(repository: Repository) -> list[str]:
    """Name each class that is defined more than once, with the files that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in repository.python(*WITH_UNIQUE_NAMES):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{source.path}:{node.lineno}")
    return [
        f"class {name} is defined {len(at)} times: {', '.join(at)}" for name, at in sorted(found.items()) if len(at) > 1
    ]


def unique_modules(repository: Repository) -> list[str]:
    """Name each module basename that is used more than once."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in repository.python(*WITH_UNIQUE_NAMES):
        found[Path(source.path).name].append(source.path)
    shared = {name: at for name, at in found.items() if len(at) > 1 and name not in SHARED_BASENAMES}
    return [f"module name {name} is used {len(at)} times: {', '.join(at)}" for name, at in sorted(shared.items())]


def retired_words(repository: Repository) -> list[str]:
    """Name each use of a retired word.

    A line of `retired_words.txt` is `word -> replacement`. A word with a leading `=` is also ordinary
    English: only identifiers and file names that have it as a part are problems. Any other word, and what
    matches the regular expression after a `~`, is a problem anywhere in code and docs.
    """
    ordinary, everywhere = read_retired(RETIRED.read_text(encoding="utf-8"))
    problems = [
        f"{path}:{line}: {name}: retired word {word!r}; write {ordinary[word]}"
        for path, line, name in _all_identifiers(repository)
        if (word := _first_retired(name, ordinary)) is not None
    ]
    problems += [
        f"{path}: file name with retired word {word!r}; write {ordinary[word]}"
        for path in repository.matching(".py", *NATIVE, ".md", ".proto")
        if (word := _first_retired(Path(path).stem, ordinary)) is not None
    ]
    for path in repository.matching(".py", *NATIVE, ".md", ".yaml", ".tpl", ".proto", ".toml", "Makefile"):
        if path in MAY_QUOTE or path.startswith(("tools/checks/", "tests/unit/test_checks")):
            continue
        for number, line in enumerate(repository.read(path).splitlines(), 1):
            problems += [
                f"{path}:{number}: retired word {found[0]!r}; write {replacement}"
                for pattern, replacement in everywhere.items()
                for found in pattern.finditer(line)
            ]
    return problems


def read_retired(text: str) -> tuple[dict[str, str], dict[re.Pattern[str], str]]:
    """Return (words banned as identifiers, patterns banned everywhere), each with its replacement."""
    ordinary, everywhere = {}, {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, _, replacement = (part.strip() for part in line.partition("->"))
        if word.startswith("="):
            ordinary[word[1:]] = replacement
        elif word.startswith("~"):
            everywhere[re.compile(word[1:])] = replacement
        else:
            everywhere[re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")] = replacement
    return ordinary, everywhere


def _all_identifiers(repository: Repository) -> Iterator[tuple[str, int, str]]:
    """Yield (path, line, name) of the names in Python, C++ and the internal protocol.

    Fields of the public API keep their names.
    """
    for source in repository.python():
        yield from ((source.path, line, name) for name, line in _identifiers(source))
    for path in repository.matching(*NATIVE, ".proto"):
        if not path.startswith("proto/baton/v1/"):
            text = _COMMENT_OR_STRING.sub("", repository.read(path))
            for number, line in enumerate(text.splitlines(), 1):
                yield from ((path, number, name) for name in _NATIVE_NAME.findall(line))


def _identifiers(source: Source) -> Iterator[tuple[str, int]]:
    """Names that this file defines: functions, classes, arguments, assigned variables and attributes."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def _first_retired(name: str, retired: Iterable[str]) -> str | None:
    """The first retired word among the parts of a name (`_has_room`, `RoomPool`), or None."""
    text = "_" + "_".join(part.lower() for part in _PART.findall(name)) + "_"
    return next((word for word in retired if f"_{word}_" in text), None)
