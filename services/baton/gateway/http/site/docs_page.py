"""The page `/docs`: endpoints and fields of the OpenAPI document as HTML, without scripts."""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
code { font: 0.875em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.route { border: 1px solid #8886; border-radius: 6px; margin: 0.5rem 0; padding: 0.5rem 0.75rem; }
.head { display: flex; gap: 0.75rem; align-items: baseline; flex-wrap: wrap; }
.head::before { content: ""; width: 0.75rem; }
summary { cursor: pointer; }
summary.head::before { content: "\\25B8"; }
[open] > summary.head::before { content: "\\25BE"; }
.method { font-weight: 600; min-width: 3.5rem; }
.key { color: #767676; margin-left: auto; font-size: 0.875em; }
table { border-collapse: collapse; width: 100%; margin: 0.75rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0; border-top: 1px solid #8884; }
td:first-child { white-space: nowrap; }
.refused { color: #767676; }
@media (max-width: 48rem) {
  thead { display: none; }
  table, tbody, tr, td { display: block; }
  td { border: 0; padding: 0; }
  td:first-child { white-space: normal; }
  tr { border-top: 1px solid #8884; padding: 0.4rem 0; }
}
"""
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{b64encode(sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing, and only its own style applies."""


def docs_page(document: Mapping[str, Any]) -> bytes:
    """Return the page for an OpenAPI document."""
    operations = "".join(
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])} API</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} API</h1><p>{escape(info['summary'])} "
        '<a href="/openapi.json">openapi.json</a> has all of this for programs. On the right is the key that a '
        "route needs if the gateway has API keys.</p>"
        f"{operations}</body></html>"
    ).encode()


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    head = (
        f'<span class="method">{escape(method.upper())}</span><code>{escape(path)}</code>'
        f'<span>{escape(operation["summary"])}</span><span class="key">{escape(operation["x-baton-key"])}</span>'
    )
    body = operation.get("requestBody")
    if body is None:
        return f'<div class="route head">{head}</div>'
    fields = _table(body["content"]["application/json"]["schema"])
    return f'<details class="route"><summary class="head">{head}</summary>{fields}</details>'


def _table(schema: Mapping[str, Any]) -> str:
    rows = "".join(_rows(schema, ""))
    return f"<table><thead><tr><th>field</th><th>value</th><th>meaning</th></tr></thead><tbody>{rows}</tbody></table>"


def _rows(schema: Mapping[str, Any], prefix: str) -> list[str]:
    """Return a row for each field: required ones first, refused ones last."""
    required = schema.get("required", ())
    rows = []
    for name, field in sorted(
        schema["properties"].items(), key=lambda item: (item[0] not in required, "enum" in item[1], item[0])
    ):
        nested = [each for each in field.get("anyOf", ()) if _is_object(each)]
        kind = "refused" if "enum" in field else _kind(field)
        mark = ", required" if name in required else ""
        rows.append(
            f"<tr{' class=refused' if kind == 'refused' else ''}><td><code>{escape(prefix + name)}</code></td>"
            f"<td>{escape(kind + mark)}</td><td>{escape(field.get('description', ''))}</td></tr>"
        )
        for each in nested:
            is_list = each["type"] == "array"
            rows += _rows(each["items"] if is_list else each, f"{prefix}{name}{'[]' if is_list else ''}.")
    return rows


def _is_object(schema: Mapping[str, Any]) -> bool:
    return "properties" in schema or "properties" in schema.get("items", {})


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a short description of the values of a schema."""
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        return " or ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}"
    bounds = [
        f"{word} {schema[name]:,}"
        for name, word in (("exclusiveMinimum", "above"), ("minimum", "from"), ("maximum", "to"))
        if name in schema
    ]
    return " ".join([str(schema.get("type", "any")), *bounds])
