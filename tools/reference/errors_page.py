"""The errors page: status codes and reason codes with their meanings."""

import ast
import inspect
from itertools import pairwise

from baton.core import errors
from baton.core.errors import Code, Reason
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
Every failure has a code and a reason. The code decides the HTTP status and the gRPC status. The reason is one word
for programs: HTTP bodies have it as `error.code`, gRPC's trailing metadata as `baton-reason`, logs and metrics as a
label. Where waiting helps, `Retry-After` or `retry-after-s` says how long.

A failure after the first token is an SSE event `error` with the same fields; the stream then ends without `[DONE]`.
"""


def errors_page() -> str:
    """A table of codes and a table of reasons."""
    codes = [(code(name), str(member.http), code(member.grpc)) for name, member in Code.__members__.items()]
    meanings = _meanings("Reason")
    reasons = [(code(member.value), meanings.get(name, "")) for name, member in Reason.__members__.items()]
    return page(
        "Errors",
        paragraph(INTRODUCTION),
        "## Codes",
        table(("code", "HTTP", "gRPC"), codes),
        "## Reasons",
        table(("reason", "meaning"), reasons),
    )


def _meanings(name: str) -> dict[str, str]:
    """The string below each member of an enum of `core.errors`."""
    tree = ast.parse(inspect.getsource(errors))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.Assign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[ast.unparse(node.targets[0])] = " ".join(str(following.value.value).split())
    return found
