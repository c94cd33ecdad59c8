"""The errors page: one table for each family of reasons, with statuses, meaning and what to do."""

import ast
import inspect
from itertools import pairwise

from baton.core import errors
from baton.core.errors import Reason, ReasonFamily
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = """
Every failure has a status and a reason. The reason is one word for programs. HTTP bodies have it as `error.code`,
gRPC's trailing metadata as `baton-reason`, logs and metrics as a label. `error.message` names the value, the rule and
the remedy.

Before a retry wait as long as `Retry-After` (HTTP) or `retry-after-s` (gRPC metadata) says. Without it the
reason says whether a retry helps; if it does, start with a
pause of 1 s and double the pause after each failure.

Baton retries by itself when a worker or a KV transfer fails: up to `--max-attempts` placements, without lost or
repeated tokens. A client sees such a reason only after the last attempt.

A failure after the first token is an SSE event `error` with the same body, and `error.status` is the HTTP status. The
stream then ends without `[DONE]`. A retry generates the response again from its first token.

Operators find signals and remedies by symptom in [Troubleshooting](../guides/troubleshooting.md).
"""


def errors_page() -> str:
    """Build the page from the members of `Reason` and the text below each."""
    texts = _texts("Reason")
    parts = []
    for family in ReasonFamily:
        rows = [_row(reason, texts[reason.name]) for reason in Reason if reason.family is family]
        parts += [f"## {family.value}", table(("reason", "HTTP", "gRPC", "what it means", "what to do"), rows)]
    return page("Errors", paragraph(INTRODUCTION), *parts)


def _row(reason: Reason, text: str) -> tuple[str, str, str, str, str]:
    meaning, action = text.split("\n\n")
    http = dict.fromkeys(str(each.http) for each in reason.codes)
    grpc = dict.fromkeys(code(each.grpc) for each in reason.codes)
    return code(reason.value), ", ".join(http), ", ".join(grpc), meaning, action


def _texts(name: str) -> dict[str, str]:
    """Return the string below each member of an enum of `core.errors`."""
    tree = ast.parse(inspect.getsource(errors))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {}
    for node, following in pairwise(body):
        if (
            isinstance(node, ast.Assign)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[ast.unparse(node.targets[0])] = inspect.cleandoc(str(following.value.value))
    return found
