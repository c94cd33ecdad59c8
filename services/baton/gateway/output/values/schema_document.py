"""Finds what references in a JSON schema point to."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_MAX_ANCHOR_STEPS = 2000
"""Values of a document among which anchors are searched."""


class SchemaDocument:
    """A JSON schema to which references in it are local. Each distinct reference is resolved once."""

    __slots__ = ("_anchors", "_resolved", "schema")

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self._resolved: dict[str, Any] = {}
        self._anchors: dict[str, Any] | None = None

    def resolve(self, reference: str) -> Any:
        """Return the schema at a reference, such as `#/$defs/Place` or `#anchor`; None if there is none."""
        if not reference.startswith("#"):
            return None
        if reference not in self._resolved:
            fragment = unquote(reference[1:])
            is_anchor = fragment and not fragment.startswith("/")
            self._resolved[reference] = self._anchored(fragment) if is_anchor else self._pointed(fragment)
        return self._resolved[reference]

    def _pointed(self, pointer: str) -> Any:
        found = self.schema
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, list) and key.isascii() and key.isdecimal() and int(key[:9]) < len(found):
                found = found[int(key[:9])]
            else:
                return None
        return found

    def _anchored(self, name: str) -> Any:
        if self._anchors is None:
            self._anchors = _anchors_in(self.schema)
        return self._anchors.get(name)


def _anchors_in(document: Any) -> dict[str, Any]:
    """Return the schemas with an anchor, by its name. A bounded number of places is searched."""
    found: dict[str, Any] = {}
    waiting = [document]
    for _ in range(_MAX_ANCHOR_STEPS):
        if not waiting:
            break
        current = waiting.pop()
        if isinstance(current, Mapping):
            for name in (current.get("$anchor"), current.get("$dynamicAnchor")):
                if isinstance(name, str):
                    found.setdefault(name, current)
            waiting += [value for value in current.values() if isinstance(value, Mapping | list)]
        elif isinstance(current, list):
            waiting += [value for value in current if isinstance(value, Mapping | list)]
    return found
