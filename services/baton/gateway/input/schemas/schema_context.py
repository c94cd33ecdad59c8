"""One JSON schema that is being read: its references, its shared subschemas, and errors with their place."""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.schemas.schema_references import Path, SchemaReferences, pointer

MAX_REFERENCES = 1024
"""References of one schema."""
_MAX_HOPS = 8


class SchemaContext:
    """State of reading one schema.

    shared: paths and values of the subschemas that become entries of `$defs`, in their order.
    multiples: digits of each `multipleOf`.
    may_combine: a value may have to match several subschemas at once.
    """

    def __init__(self, place: str, document: Mapping[str, Any], *, lenient: bool) -> None:
        self.shared: list[tuple[Path, Any]] = []
        self.multiples: list[int] = []
        self.may_combine = False
        self._place = place
        self._document = document
        self._lenient = lenient
        self._references: SchemaReferences | None = None
        self._numbers: dict[int, int] = {}  # of shared schemas, by identity
        self._num_references = 0

    def error(self, path: Path, message: str) -> InvalidField:
        """Return an error about the value at `path`."""
        where = f"{self._place} at {printable_pointer(path)}" if path is not None else self._place
        return InvalidField(self._place, f"{where} {message}", Reason.INVALID_GRAMMAR)

    def unsupported(self, path: Path, why: str = "is not supported") -> None:
        """Raise InvalidField for a keyword that cannot be enforced, unless the schema is lenient."""
        if not self._lenient:
            remedy = "leave it out" if self._place.startswith("tools") else "leave it out, or set strict to false"
            raise self.error(path, f"{why}; {remedy}")

    def reference(self, path: Path, schema: Mapping[str, Any], value: object) -> dict[str, Any]:
        """Return what `$ref` becomes in the result. `path` is that of the keyword. Raises InvalidField."""
        self._num_references += 1
        if self._num_references > MAX_REFERENCES:
            raise self.error(path, f"is one of more than {MAX_REFERENCES:,} references; use fewer")
        if not isinstance(value, str):
            raise self.error(path, f"is {printable(value)}; must be a string")
        found = self._find(schema, value)
        if found is None:
            message = f"is {printable(value)}, which the schema does not have; other documents are not fetched"
            raise self.error(path, message)
        target_path, target = found
        if isinstance(target, bool):
            return {} if target else {"allOf": [False]}
        if not isinstance(target, dict):
            raise self.error(path, f"is {printable(value)}, which is no schema")
        return self.share(target_path, target)

    def share(self, path: Path, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return a reference to a subschema, which becomes an entry of `$defs`."""
        number = self._numbers.setdefault(id(schema), len(self.shared))
        if number == len(self.shared):
            self.shared.append((path, schema))
        return {"$ref": f"#/$defs/{number}"}

    def followed(self, schema: object) -> object:
        """Return the schema that a chain of references ends with, as the client wrote it."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            found = self._find(schema, schema["$ref"])
            if found is None:
                break
            schema = found[1]
        return schema

    def _find(self, schema: Mapping[str, Any], reference: str) -> tuple[Path, Any] | None:
        if self._references is None:
            self._references = SchemaReferences(self._document)
        try:
            return self._references.find(reference, schema)
        except ValueError:  # no URI
            return None


def printable_pointer(path: Path) -> str:
    """Return a JSON pointer for an error message, ASCII only."""
    return ascii(pointer(path))[1:-1]
