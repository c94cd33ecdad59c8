"""Bounds JSON values of requests that the chat template gets: tool schemas, documents and variables."""

from array import array
from collections.abc import Mapping
from typing import Any

from baton.core.request_limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import check_text

OTHER_CHARACTERS = 8
"""Characters that a value without text counts as."""


class ValueBudget:
    """Number of values, and of characters, that one field of a request may still have.

    The cost of a check is bounded by the budget, not by the size of the field.
    """

    def __init__(self, field: str, max_characters: int, max_values: int = MAX_JSON_VALUES) -> None:
        """Create a budget. `field` is named in errors."""
        self._field = field
        self._max_characters = max_characters
        self._max_values = max_values
        self.num_characters = 0
        self.num_values = 0

    def plain(self, place: str, value: object, depth: int = 0) -> Any:
        """Return a copy of a JSON value made of plain dicts and lists. Raises InvalidField if it is too
        large or nested too deeply, or has invalid text."""
        if depth > MAX_JSON_DEPTH:
            raise InvalidField(place, f"{place} is nested more than {MAX_JSON_DEPTH} levels deep; flatten it")
        if isinstance(value, str):
            self.take(len(value))
            check_text(place, value)
            return value
        if isinstance(value, Mapping):
            self.take(OTHER_CHARACTERS)
            plain: dict[str, Any] = {}
            for key, item in value.items():
                self.take(len(key))
                check_text(place, key)
                plain[key] = self.plain(place, item, depth + 1)
            return plain
        if isinstance(value, array):
            self.take(OTHER_CHARACTERS * len(value), len(value))
            return value.tolist()
        if isinstance(value, list | tuple):
            self.take(OTHER_CHARACTERS)
            return [self.plain(place, item, depth + 1) for item in value]
        if value is None or isinstance(value, bool | int | float):
            self.take(OTHER_CHARACTERS)
            return value
        raise InvalidField(place, f"{place} has a value of type {type(value).__name__}; must be JSON")

    def plain_object(self, place: str, value: object) -> dict[str, Any]:
        """Return a copy of a JSON object. Raises InvalidField if it is none."""
        if not isinstance(value, Mapping):
            raise InvalidField(place, f"{place} is {printable(value)}; must be an object")
        plain: dict[str, Any] = self.plain(place, value)
        return plain

    def take(self, num_characters: int, num_values: int = 1) -> None:
        """Count values. Raises InvalidField if there are too many."""
        self.num_characters += num_characters
        self.num_values += num_values
        if self.num_characters > self._max_characters:
            raise InvalidField(
                self._field,
                f"{self._field} has more than {self._max_characters:,} characters; send less",
            )
        if self.num_values > self._max_values:
            raise InvalidField(
                self._field, f"{self._field} has more than {self._max_values:,} strings and numbers; send less"
            )
