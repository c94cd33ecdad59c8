"""Layout: folders and functions stay small enough to read, lines stay inside the page."""

import ast
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from tools.checks.source import Repository

MAX_FILES = 16
"""Modules in one folder of a package. A larger folder needs subfolders."""
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: Mapping[str, str] = {
    "services/baton/model/kernels/triton/triton_attention.py:_attend": "Triton compiles a kernel from one function",
    "loadgen/plan/sources/sharegpt.py:replay_conversations": "one pass with many counters, read from top to bottom",
}
"""Functions that may be longer, with the reason."""
MAX_TEXT_COLUMNS = 110
MAX_CODE_COLUMNS = 120
_PRAGMA = re.compile(r"\s+# (type: ignore|noqa).*$")
_URL_OR_TABLE = re.compile(r"^\s*\||https?://|^\s*\[[^\]]+\]:|^!\[|^\s*<")


def large_folders(repository: Repository) -> list[str]:
    """Name each folder of a package that has too many modules."""
    count = Counter(
        str(PurePosixPath(source.path).parent) for source in repository.python("services/", "loadgen/", "bench/")
    )
    return [
        f"{folder} has {number} modules, at most {MAX_FILES}"
        for folder, number in sorted(count.items())
        if number > MAX_FILES
    ]


def long_functions(repository: Repository) -> list[str]:
    """Name each function that is too long to be read at once."""
    return [
        f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        for source in repository.python("services/", "loadgen/", "bench/", "tools/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
        and f"{source.path}:{node.name}" not in LONG_FUNCTIONS
    ]


def wide_lines(repository: Repository) -> list[str]:
    """Name each line of prose over 110 columns and each line of code over 120.

    Tables, addresses and code blocks in Markdown may be wider.
    """
    problems = []
    for path in repository.matching(".md"):
        is_code = False
        for number, line in enumerate(repository.read(path).splitlines(), 1):
            if line.lstrip().startswith("```"):
                is_code = not is_code
            elif not is_code and len(line) > MAX_TEXT_COLUMNS and not _URL_OR_TABLE.search(line):
                problems.append(f"{path}:{number}: {len(line)} columns of text, at most {MAX_TEXT_COLUMNS}")
    for source in repository.python():
        lines = source.text.splitlines()
        for first, last in _docstring_lines(source.tree):
            problems += [
                f"{source.path}:{number}: {len(lines[number - 1])} columns of docstring, at most {MAX_TEXT_COLUMNS}"
                for number in range(first, last + 1)
                if len(lines[number - 1]) > MAX_TEXT_COLUMNS and "http" not in lines[number - 1]
            ]
        problems += [
            f"{source.path}:{number}: {len(line)} columns of code, at most {MAX_CODE_COLUMNS}"
            for number, line in enumerate(lines, 1)
            if len(_PRAGMA.sub("", line)) > MAX_CODE_COLUMNS and "http" not in line
        ]
    return problems


def _docstring_lines(tree: ast.Module) -> list[tuple[int, int]]:
    """First and last line of every string that stands alone as a statement."""
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
