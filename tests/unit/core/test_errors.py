"""Reasons and the codes with which they are sent."""

import ast
from collections.abc import Iterator
from pathlib import Path

import baton
from baton.core.errors import Code, Reason

BETWEEN_SERVICES = {
    (Reason.SLOW_READER, Code.RESOURCE_EXHAUSTED),  # a full stream; the gateway places the request again
    (Reason.LAYOUT_MISMATCH, Code.INVALID_ARGUMENT),  # answers a worker's hello
}


def test_every_failure_in_the_source_has_a_code_that_the_errors_page_lists() -> None:
    (root,) = baton.__path__
    sources = (path.read_text() for path in Path(root).rglob("*.py"))
    pairs = {pair for source in sources if "Reason." in source for pair in _pairs(ast.parse(source))}

    assert len(pairs) > 20
    assert {(reason, code) for reason, code in pairs if code not in reason.codes} == BETWEEN_SERVICES


def _pairs(tree: ast.AST) -> Iterator[tuple[Reason, Code]]:
    """Yield the reason and the code of each call that names one of each."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        names = [ast.unparse(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))]
        reasons = [reason for reason in Reason if str(reason) in names]
        codes = [code for code in Code if str(code) in names]
        if len(reasons) == len(codes) == 1:
            yield reasons[0], codes[0]
