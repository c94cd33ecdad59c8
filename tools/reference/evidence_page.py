"""The test evidence page: which test shows which fault of the fault model, from pytest markers."""

import ast
import re
from collections import defaultdict

from tools.checks.source import Repository, Source
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
A test that shows a fault of the [fault model](../design/fault-model.md) has the marker `@pytest.mark.fault("F-27")`.
This page lists the markers. Tests below `tests/gpu` and those marked `long` do not run in `make test`.
"""
FAULT_MODEL = "docs/design/fault-model.md"
_ID = re.compile(r"\bF-\d+[a-z]?\b")


def evidence_page() -> str:
    """One row per fault of the fault model, with the tests that show it."""
    repository = Repository.open()
    shown = marked_tests(repository)
    rows = [
        (fault, "<br>".join(code(test) for test in shown.get(fault, [])) or "no test") for fault in faults(repository)
    ]
    return page("Test evidence", paragraph(INTRODUCTION), table(("fault", "shown by"), rows))


def faults(repository: Repository) -> list[str]:
    """The ids of the fault model, in its order."""
    if FAULT_MODEL not in repository.paths:
        return []
    lines = [line for line in repository.read(FAULT_MODEL).splitlines() if line.startswith("| F-")]
    return [match[0] for line in lines if (match := _ID.search(line)) is not None]


def marked_tests(repository: Repository) -> dict[str, list[str]]:
    """Tests by the fault ids of their own, their class's and their module's markers."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in repository.python("tests/"):
        for fault, test in _of(source):
            found[fault].append(test)
    return {fault: sorted(set(tests)) for fault, tests in found.items()}


def _of(source: Source) -> list[tuple[str, str]]:
    module = [
        fault
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for fault in _ids(node.value)
    ]
    pairs = [(fault, source.path) for fault in module]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            ids = [fault for decorator in node.decorator_list for fault in _ids(decorator)]
            pairs += [(fault, f"{source.path}::{node.name}") for fault in ids]
    return pairs


def _ids(node: ast.AST) -> list[str]:
    """Arguments of `pytest.mark.fault(...)` in an expression."""
    return [
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
