"""Describes one setting: its names, type, bounds and help, and converts and validates its values."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.runtime.config.byte_sizes import SIZE_PATTERN, format_size, parse_size

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXPECTED = {
    str: "text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple: "a list of strings",
    Path: "a path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherForm:
    """Texts that a setting accepts besides its choices.

    name: what to call such a text in help and errors, such as `MODULE:FUNCTION`.
    pattern: regular expression that the whole text must match. It is also the one of the JSON schema.
    """

    name: str
    pattern: str

    def matches(self, text: str) -> bool:
        """Return True if `text` has this form."""
        return re.fullmatch(self.pattern, text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a `Config` as seen by the command line, the environment and a YAML file.

    kind: str, int, float, bool, Path, or tuple (of str).
    optional: True if the value may be None.
    choices: the allowed texts; empty if any text is allowed.
    other_form: texts that are allowed besides the choices; None if there are none.
    help, unit: description for people, without a final period; the unit that the number counts.
    minimum, maximum: inclusive bounds.
    above: exclusive lower bound.
    secret: True if the value may contain a password, which is never shown or logged.
    aliases: deprecated names, as field names; still accepted, but hidden from help.
    value_aliases: deprecated choices and their replacements.
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
    aliases: tuple[str, ...]
    value_aliases: Mapping[str, str]
    other_form: OtherForm | None = None

    @property
    def forms(self) -> tuple[str, ...]:
        """The choices and the name of the other form, for help and errors. Empty if any text is allowed."""
        return self.choices if self.other_form is None else (*self.choices, self.other_form.name)

    @property
    def flag(self) -> str:
        """Command-line flag, such as `--http-port`."""
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        """Environment variable, such as `BATON_HTTP_PORT`."""
        return variable_of(self.name)

    @property
    def is_size(self) -> bool:
        """True if the value may be written with a unit, such as `512MiB`."""
        return self.kind is int and self.unit == "bytes"

    @property
    def description(self) -> str:
        """Help text with the unit, without default value and names."""
        return f"{self.help} ({self.unit})" if self.unit else self.help

    def parse(self, text: str) -> Any:
        """Parse text from a flag, a variable or a quoted YAML value.

        Raises ValueError naming the expected form.
        """
        if self.kind is bool:
            word = text.strip().lower()
            if word not in _WORDS:
                raise ValueError(f"expected true or false, got {text!r}")
            return _WORDS[word]
        if self.kind is tuple:
            return tuple(item.strip() for item in text.split(",") if item.strip())
        if self.is_size:
            return parse_size(text)
        if self.kind in (int, float):
            return self._number(text)
        return Path(text) if self.kind is Path else text

    def convert(self, value: object) -> Any:
        """Convert a typed value of a YAML file or of `dump`. Raises ValueError naming the expected type."""
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            return self.parse(value)
        if self.kind is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        if self.kind is Path and isinstance(value, Path):
            return value
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value)
        raise ValueError(f"expected {self._expected}, got {value!r}")

    def problem(self, value: Any) -> str:
        """Return the reason why `value` is not allowed, or an empty string if it is allowed."""
        if value is None:
            return "" if self.optional else f"expected {self._expected}, got none"
        is_kind = isinstance(value, self.kind) or (self.kind is float and isinstance(value, int))
        if not is_kind or (isinstance(value, bool) and self.kind is not bool):
            return f"expected {self._expected}, got {value!r}"
        has_other_form = self.other_form is not None and self.other_form.matches(value)
        if self.choices and value not in self.choices and not has_other_form:
            return f"expected one of {', '.join(self.forms)}, got {value!r}"
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
        """Convert a value to JSON types."""
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    def shown(self, value: Any) -> str:
        """Format a value as one would write it in a flag, with its password masked; empty for None."""
        if value is None:
            return ""
        if self.secret:
            return _mask_password(str(value))
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ",".join(value)
        return format_size(value) if self.is_size else str(value)

    def schema(self) -> dict[str, Any]:
        """JSON schema of this setting's YAML key."""
        types = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array", Path: "string"}
        shape: dict[str, Any] = {"type": types[self.kind]}
        if self.choices:
            shape["enum"] = [*self.choices, *self.value_aliases]
        if self.kind is tuple:
            shape["items"] = {"type": "string"}
        bounds = {"minimum": self.minimum, "exclusiveMinimum": self.above, "maximum": self.maximum}
        shape |= {word: bound for word, bound in bounds.items() if bound is not None}
        variants = [shape]
        if self.is_size:
            variants.append({"type": "string", "pattern": SIZE_PATTERN})
        if self.other_form is not None:
            variants.append({"type": "string", "pattern": f"^{self.other_form.pattern}$"})
        if self.optional:
            variants.append({"type": "null"})
        described = {"description": self.description, "default": self.plain(self.default)}
        return {**described, **shape} if len(variants) == 1 else {**described, "anyOf": variants}

    def alias_schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the deprecated keys, by key."""
        schema = {key: value for key, value in self.schema().items() if key != "default"}
        notice = {"description": f"Deprecated: use {self.name}.", "deprecated": True}
        return dict.fromkeys(self.aliases, schema | notice)

    def _number(self, value: str | float) -> float:
        """Convert to int or float, as `kind` requires.

        An integral float is accepted as an int, because templating tools write 8388608 as 8.388608e+06.
        """
        if self.kind is int and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            return int(value)
        try:
            number = float(value)
        except (ValueError, OverflowError) as error:
            # Kubernetes sets NAME_PORT=tcp://10.0.0.1:80 for every Service, even if NAME_PORT is one of
            # Baton's settings.
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
            return f"one of {', '.join(self.forms)}"
        return "a size such as 512MiB" if self.is_size else _EXPECTED[self.kind]


def flag_of(name: str) -> str:
    """Return the command-line flag of the setting called `name`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Return the environment variable of the setting called `name`."""
    return "BATON_" + name.upper()


def _mask_password(url: str) -> str:
    """Replace the password in a URL, if there is one, by asterisks."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url
