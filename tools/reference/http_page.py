"""The HTTP page: routes, and every request field with its limits."""

import ast
import inspect

from baton.core.request_limits import LIMITS, MAX_HEAD_BYTES, MAX_JSON_DEPTH, Limit
from baton.gateway.http import http_app
from baton.gateway.input import field_policy
from tools.reference.markdown import code, page, paragraph, table

INTRODUCTION = f"""
The gateway serves OpenAI's API for completions and chat. A field is either read, accepted as a label without effect,
or refused by name; no field is ignored silently. Errors have OpenAI's shape; [Errors](errors.md) lists each status
and reason, and what a client does about it. A request head may have {MAX_HEAD_BYTES // 1024} KiB, a JSON body
{MAX_JSON_DEPTH} levels.
"""


def http_page() -> str:
    """Routes, fields that are read, labels, and fields that are refused."""
    return page(
        "HTTP API",
        paragraph(INTRODUCTION),
        "## Routes",
        table(("method", "path", "what it does"), _routes()),
        "## Request fields",
        paragraph(
            "`chat` is `/v1/chat/completions`, `completions` is `/v1/completions`. "
            "A name with a dot is a field of an object."
        ),
        table(
            ("field", "type", "limits", "default", "endpoints"),
            [_field(name, limit) for name, limit in sorted(LIMITS.items())],
        ),
        "## Labels",
        paragraph("These are accepted and do not change the answer."),
        paragraph(", ".join(code(name) for name in sorted({*field_policy.LABELS, "metadata", "store"})) + "."),
        "## Fields that are refused",
        paragraph("A field is refused unless it has one of the values that change nothing. `null` is always accepted."),
        table(("field", "endpoints", "accepted values", "what to do instead"), _refused()),
    )


def _routes() -> list[tuple[str, str, str]]:
    """Method, path and first docstring line of each handler, from the application's own table."""
    tree = ast.parse(inspect.getsource(http_app))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "self._routes"
            and isinstance(node.value, ast.Dict)
        ):
            rows = []
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert key is not None
                path = str(eval(ast.unparse(key), vars(http_app)))  # a literal or a constant of the module
                assert isinstance(value, ast.Tuple)
                method, handler = ast.literal_eval(value.elts[0]), ast.unparse(value.elts[1]).removeprefix("self.")
                text = (inspect.getdoc(getattr(http_app.HttpApp, handler)) or "").split("\n\n")[0]
                rows.append((method, code(path + ("{id}" if path.endswith("/") else "")), text))
            return rows
    raise RuntimeError("http_app.HttpApp has no table of routes any more: adapt tools/reference/http_page.py")


def _field(name: str, limit: Limit) -> tuple[str, str, str, str, str]:
    top = name.partition(".")[0]
    endpoints = [
        label
        for label, fields in (("chat", field_policy.CHAT), ("completions", field_policy.COMPLETIONS))
        if top in fields
    ]
    count = f"at most {limit.max_items} items" if limit.max_items is not None else ""
    is_bounded = any(bound is not None for bound in (limit.minimum, limit.above, limit.maximum))
    bounds = ", ".join(filter(None, (count, limit.range if is_bounded else "")))
    default = (
        ""
        if limit.default is None
        else str(limit.default).lower()
        if isinstance(limit.default, bool)
        else str(limit.default)
    )
    return code(name), limit.kind.value, bounds, code(default), ", ".join(endpoints)


def _refused() -> list[tuple[str, str, str, str]]:
    tables = (("chat", field_policy.NOT_IN_CHAT), ("completions", field_policy.NOT_IN_COMPLETIONS))
    rows = []
    for name in sorted({name for _, fields in tables for name in fields}):
        where = [label for label, fields in tables if name in fields]
        entry = next(fields[name] for _, fields in tables if name in fields)
        accepted = ", ".join(code(repr(value)) for value in entry.defaults)
        rows.append((code(name), ", ".join(where), accepted, entry.advice))
    return rows
