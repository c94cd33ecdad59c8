"""Docstrings, of constants too: the first line is a full statement that stands alone."""

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tools.checks.source import Repository, Source

CHECKED = ("services/", "loadgen/", "bench/", "tools/")
CONNECTIVES = frozenset(
    """And As At Because But For From How If Of Or So That Then There To Until What When Where Whether Which While Who
    Whoever Whom Whose Why With Without""".split()
)
"""A first line that begins with one of these is a fragment, not a statement."""
MAX_SENTENCE_WORDS = 40
_FIRST_WORD = re.compile(r"[`\"'(]*([A-Za-z]+)")


def first_lines(repository: Repository) -> list[str]:
    """Name each docstring whose first paragraph does not end a sentence or begins with a bare connective."""
    return [
        f"{source.path}:{line}: {what}: {problem}"
        for source in repository.python(*CHECKED)
        for what, line, text in _docstrings(source)
        if (problem := problem_of(text)) is not None
    ]


def modules_without_docstring(repository: Repository) -> list[str]:
    """Name each module that has code and no docstring."""
    return [
        f"{source.path}: the module has no docstring"
        for source in repository.python(*CHECKED)
        if source.text.strip() and ast.get_docstring(source.tree) is None
    ]


def stray_docstrings(repository: Repository) -> list[str]:
    """Name each string that follows no assignment, as the docstring of a constant that was moved."""
    return [
        f"{source.path}:{below.lineno}: a docstring below no constant"
        for source in repository.python()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Module | ast.ClassDef)
        for above, below in pairwise(node.body)
        if _is_string(below) and not isinstance(above, ast.Assign | ast.AnnAssign)
    ]


def _is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def problem_of(text: str) -> str | None:
    """Return the problem of the first paragraph of a docstring, or None."""
    first = text.strip().split("\n\n")[0].replace("\n", " ").strip()
    if not first:
        return "the docstring is empty"
    sentence = re.split(r"(?<=[.:!?])\s", first)[0]
    if not re.search(r"[.:!?`)\"]$", first):
        return f"the first paragraph does not end with a period: {sentence[:60]!r}"
    word = _FIRST_WORD.match(first)
    if word is not None and word[1] in CONNECTIVES:
        return f"begins with {word[1]!r}; state what it is or does"
    if len(sentence.split()) > MAX_SENTENCE_WORDS:
        return f"the first sentence has {len(sentence.split())} words, at most {MAX_SENTENCE_WORDS}"
    return None


def _docstrings(source: Source) -> Iterator[tuple[str, int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "module")
            text = ast.get_docstring(node)
            if text is not None and not name.startswith("_"):
                yield name, getattr(node, "lineno", 1), text
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from _docstrings_of_constants(node.body)


def _docstrings_of_constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, int, str]]:
    """Yield the strings that stand below an assignment."""
    for above, below in pairwise(body):
        if not isinstance(above, ast.Assign | ast.AnnAssign) or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            target = above.targets[0] if isinstance(above, ast.Assign) else above.target
            yield ast.unparse(target), below.lineno, inspect.cleandoc(below.value.value)
