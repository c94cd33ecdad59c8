"""Finds the schemas that references of a JSON schema point to: by JSON pointer, `$anchor` or `$id`.

Other documents are never fetched.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose value is any JSON, not a schema."""
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value has a schema for each name."""

_MAX_POINTER_CHARACTERS = 80

Path: TypeAlias = tuple["Path", str] | None
"""Place of a value in a document: the path of its parent, and its name there. None is the document itself."""


def pointer(path: Path) -> str:
    """Return a path as a JSON pointer. The middle of a long one is left out."""
    names: list[str] = []
    while path is not None:
        path, name = path
        names.append(name.replace("~", "~0").replace("/", "~1"))
    found = "".join(
        f"/{name if len(name) <= _MAX_POINTER_CHARACTERS else name[:_MAX_POINTER_CHARACTERS] + '…'}"
        for name in reversed(names)
    )
    half = _MAX_POINTER_CHARACTERS // 2
    return found if len(found) <= _MAX_POINTER_CHARACTERS else f"{found[:half]}…{found[-half:]}"


class SchemaReferences:
    """The schemas of one document by pointer, and by the URIs that `$id` and `$anchor` give them."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._resources: dict[str, tuple[Path, Any]] = {"": (None, document)}
        self._anchors: dict[tuple[str, str], tuple[Path, Any]] = {}
        self._base_of: dict[int, str] = {}  # by identity of the schema, which the document keeps alive
        self._scan()

    def find(self, reference: str, schema: Mapping[str, Any]) -> tuple[Path, Any] | None:
        """Return the path and the value that a reference in `schema` points to; None if there is
        none."""
        base = self._base_of.get(id(schema), "")
        uri, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        resource = self._resources.get(uri)
        if resource is None:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        path, found = resource
        for step in fragment.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(found):
                found = found[int(name[:9])]
            else:
                return None
            path = (path, name)
        return path, found

    def _scan(self) -> None:
        """Note each resource and anchor, and the base URI of each schema."""
        stack: list[tuple[Path, Any, str, bool]] = [(None, self._document, "", False)]
        while stack:
            path, value, base, is_named = stack.pop()
            if isinstance(value, list):
                stack += [((path, str(n)), item, base, False) for n, item in enumerate(value)]
            if not isinstance(value, dict):
                continue
            if not is_named:
                base = self._note(path, value, base)
            stack += [
                ((path, name), item, base, not is_named and name in NAMED)
                for name, item in value.items()
                if isinstance(item, dict | list) and (is_named or name not in VALUES)
            ]

    def _note(self, path: Path, schema: Mapping[str, Any], base: str) -> str:
        own = schema.get("$id")
        if isinstance(own, str) and not own.startswith("#"):
            try:
                base = urldefrag(urljoin(base, own)).url
            except ValueError:  # no URI, so nothing can refer to it
                return base
            self._resources.setdefault(base, (path, schema))
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(name), str):
                self._anchors.setdefault((base, anchor), (path, schema))
        if base:
            self._base_of[id(schema)] = base
        return base
