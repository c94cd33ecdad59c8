"""The test evidence page: which test shows which fault of the fault model, from pytest markers."""

import ast
import re
from collections import defaultdict
from typing import NamedTuple

from tools.checks.source import Repository, Source
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
A test that shows a fault of the [fault model](../design/fault-model.md) has the marker `@pytest.mark.fault("F-27")`.
This page lists the markers. Tests followed by *long* run in `make test-long` but not in `make test`. Tests below
`tests/gpu` need a GPU. The column `make test` says whether at least one test of the fault runs there.
"""
FAULT_MODEL = "docs/design/fault-model.md"
_ID = re.compile(r"\bF-\d+[a-z]?\b")


class MarkedTest(NamedTuple):
    """A test that shows a fault."""

    name: str
    is_long: bool
    """True if the test itself or its module is marked `long`, not only some of its parameters."""

    @property
    def runs_in_make_test(self) -> bool:
        """True if `make test` on a machine without a GPU runs the test."""
        return not self.is_long and not self.name.startswith("tests/gpu/")


def evidence_page() -> str:
    """One row per fault of the fault model, with the tests that show it."""
    repository = Repository.open()
    shown = marked_tests(repository)
    rows = [_row(fault, shown.get(fault, [])) for fault in faults(repository)]
    return page("Test evidence", paragraph(INTRODUCTION), table(("fault", "`make test`", "shown by"), rows))


def _row(fault: str, tests: list[MarkedTest]) -> tuple[str, str, str]:
    names = [code(test.name) + (" *long*" if test.is_long else "") for test in tests]
    in_make_test = "yes" if any(test.runs_in_make_test for test in tests) else "no"
    return fault, in_make_test, "<br>".join(names) or "no test"


def faults(repository: Repository) -> list[str]:
    """The ids of the fault model, in its order."""
    if FAULT_MODEL not in repository.paths:
        return []
    lines = [line for line in repository.read(FAULT_MODEL).splitlines() if line.startswith("| F-")]
    return [match[0] for line in lines if (match := _ID.search(line)) is not None]


def marked_tests(repository: Repository) -> dict[str, list[MarkedTest]]:
    """Tests by the fault ids of their own and their module's markers."""
    found: dict[str, list[MarkedTest]] = defaultdict(list)
    for source in repository.python("tests/"):
        for fault, test in _of(source):
            found[fault].append(test)
    return {fault: sorted(set(tests)) for fault, tests in found.items()}


def _of(source: Source) -> list[tuple[str, MarkedTest]]:
    module_marks = [
        node.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    is_module_long = any(_is_long(mark) for marks in module_marks for mark in _elements(marks))
    pairs = [(fault, MarkedTest(source.path, is_module_long)) for marks in module_marks for fault in _ids(marks)]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            is_long = is_module_long or any(_is_long(decorator) for decorator in node.decorator_list)
            test = MarkedTest(f"{source.path}::{node.name}", is_long)
            pairs += [(fault, test) for decorator in node.decorator_list for fault in _ids(decorator)]
    return pairs


def _elements(marks: ast.expr) -> list[ast.expr]:
    """Marks of a `pytestmark`, which is one mark or a list of them."""
    return marks.elts if isinstance(marks, ast.List | ast.Tuple) else [marks]


def _is_long(mark: ast.expr) -> bool:
    return ast.unparse(mark) == "pytest.mark.long"


def _ids(node: ast.AST) -> list[str]:
    """Arguments of `pytest.mark.fault(...)` in an expression."""
    return [
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.fault"
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
