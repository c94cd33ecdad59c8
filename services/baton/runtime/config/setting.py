"""One setting: its names, how its text is read, what values it may have, and how it is described."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.runtime.config.byte_sizes import SIZE_PATTERN, format_size, parse_size

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXPECTED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list of texts",
    Path: "a path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of a `Config` as the command line, the environment and a YAML file see it.

    `kind`: str, int, float, bool, Path, or tuple (of str). `choices`: the only texts allowed, when there are
    any.
    """

    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    unit: str
    minimum: float | None
    above: float | None
    maximum: float | None
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "BATON_" + self.name.upper()

    @property
    def is_size(self) -> bool:
        """Whether it may be written `512MiB`."""
        return self.kind is int and self.unit == "bytes"

    @property
    def description(self) -> str:
        """The help with its unit, without default or names, which each front end shows in its own way."""
        return f"{self.help}, in {self.unit}" if self.unit else self.help

    def parse(self, text: str) -> Any:
        """The value of a text, from a flag, a variable or a quoted value of a file. Raises ValueError saying
        what was expected."""
        if self.kind is bool:
            word = text.strip().lower()
            if word not in _WORDS:
                raise ValueError(f"expected true or false, got {text!r}")
            return _WORDS[word]
        if self.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if self.is_size:
            return parse_size(text)
        if self.kind in (int, float):
            return self._number(text)
        return Path(text) if self.kind is Path else text

    def convert(self, value: object) -> Any:
        """The value of a typed object, from a YAML file or from `dump`. Raises ValueError saying what was
        expected."""
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            return self.parse(value)
        if self.kind is tuple and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
            return tuple(value)
        if self.kind is Path and isinstance(value, Path):
            return value
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value)
        raise ValueError(f"expected {self._expected}, got {value!r}")

    def problem(self, value: Any) -> str:
        """Why the field cannot have this value; empty when it can."""
        if value is None:
            return "" if self.optional else f"expected {self._expected}, got nothing"
        is_kind = isinstance(value, self.kind) or (self.kind is float and isinstance(value, int))
        if not is_kind or (isinstance(value, bool) and self.kind is not bool):
            return f"expected {self._expected}, got {value!r}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(self.choices)}, got {value!r}"
        if self.kind is float and not math.isfinite(value):
            return f"expected a finite number, got {value!r}"
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:g}, got {value:g}"
        if self.above is not None and value <= self.above:
            return f"must be more than {self.above:g}, got {value:g}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:g}, got {value:g}"
        return ""

    def plain(self, value: Any) -> Any:
        """The value in JSON's types."""
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    def shown(self, value: Any) -> str:
        """The value as one would write it; a password in it is masked. Empty for None."""
        if value is None:
            return ""
        if self.secret:
            return _masked(str(value))
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(value)
        return format_size(value) if self.is_size else str(value)

    def schema(self) -> dict[str, Any]:
        """This key's JSON schema."""
        types = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array", Path: "string"}
        shape: dict[str, Any] = {"type": types[self.kind]}
        if self.choices:
            shape["enum"] = list(self.choices)
        if self.kind is tuple:
            shape["items"] = {"type": "string"}
        bounds = {"minimum": self.minimum, "exclusiveMinimum": self.above, "maximum": self.maximum}
        shape |= {word: bound for word, bound in bounds.items() if bound is not None}
        variants = [shape]
        if self.is_size:
            variants.append({"type": "string", "pattern": SIZE_PATTERN})
        if self.optional:
            variants.append({"type": "null"})
        described = {"description": self.description, "default": self.plain(self.default)}
        return {**described, **shape} if len(variants) == 1 else {**described, "anyOf": variants}

    def _number(self, value: str | float) -> float:
        """An int or float, as `kind` says. A float that is whole is a whole number: templating tools write
        8388608 as 8.388608e+06."""
        if self.kind is int and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            return int(value)
        try:
            number = float(value)
        except (ValueError, OverflowError) as error:
            # A Service that Kubernetes links into a pod sets NAME_PORT=tcp://10.0.0.1:80, also where
            # NAME_PORT is a setting of ours.
            hint = (
                "; Kubernetes set it for a Service of that name (enableServiceLinks: false)"
                if "tcp://" in str(value)
                else ""
            )
            raise ValueError(f"expected {self._expected}, got {value!r}{hint}") from error
        if self.kind is float:
            return number
        if not number.is_integer():
            raise ValueError(f"expected {self._expected}, got {value!r}")
        return int(value) if isinstance(value, int) else int(number)

    @property
    def _expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return "a size such as 512MiB" if self.is_size else _EXPECTED[self.kind]


def _masked(url: str) -> str:
    """`url` with its password, if it has one, replaced."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url
