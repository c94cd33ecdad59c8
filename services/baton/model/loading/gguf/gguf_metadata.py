"""Reads typed values from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.core.errors import ModelError

MAX_INTEGER = 1 << 40


class GgufMetadata:
    """Metadata with type checks. Keys of the architecture are given without its name.

    Raises ModelError, with the key, for a value that is missing or of another type.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.architecture = self.text("general.architecture")

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self.problem(key, value, "a text")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if key not in self._values else self.text(key)

    def texts(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.problem(key, value, "a list of texts")
        return value

    def optional_texts(self, key: str) -> list[str]:
        return self.texts(key) if self.has(key) else []

    def has(self, key: str) -> bool:
        return key in self._values

    def any(self, key: str) -> Any:
        """Return a value of any type; None if there is none."""
        return self._values.get(key)

    def integers(self, key: str) -> list[int]:
        """Return a list of integers; empty if there is none."""
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.problem(key, value, "a list of integers")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.problem(key, value, "true or false")
        return value

    def token_id(self, name: str) -> int | None:
        """Return `tokenizer.ggml.NAME_token_id`, if there is one."""
        return self.optional_integer(f"tokenizer.ggml.{name}_token_id", of_architecture=False)

    def integer(self, key: str) -> int:
        """Return an integer of the architecture. One value for each layer must be the same for all."""
        value = self.optional_integer(key)
        if value is None:
            raise self.problem(self._full(key), None, "an integer")
        return value

    def optional_integer(self, key: str, *, of_architecture: bool = True) -> int | None:
        full = self._full(key) if of_architecture else key
        value = self._values.get(full)
        if value is None:
            return None
        value = self._same_for_all(full, value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
            raise self.problem(full, value, f"an integer from 0 to {MAX_INTEGER}")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self.problem(self._full(key), None, "a number")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(self._full(key))
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.problem(self._full(key), value, "a number")
        short = np.float32(value)
        # the shortest decimal: 1e-5 and not 9.999999747e-06
        return float(str(short)) if float(short) == value else float(value)

    def optional_values(self, key: str) -> Sequence[Any] | None:
        """Return a list of the architecture, one value for each layer; None if it is no list."""
        value = self._values.get(self._full(key))
        return value if isinstance(value, list) else None

    def problem(self, key: str, value: object, rule: str) -> ModelError:
        shown = repr(value)[:80]
        return ModelError(f"{self.path}: its metadata value {key} is {shown}; must be {rule}")

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _same_for_all(self, key: str, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.problem(key, value, "the same for all layers")
        return value[0]
