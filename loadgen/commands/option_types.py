"""Click parameter types that several commands share."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from loadgen import text_forms
from loadgen.loadgen_errors import LoadgenError
from loadgen.slo_target import SloScale, SloTarget

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Seconds(click.ParamType):
    """Click type for a duration above zero such as `300ms`, `5s` or `2m`, returned in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = text_forms.seconds(value)
        except LoadgenError as error:
            self.fail(str(error), param, ctx)
        if seconds <= 0:
            self.fail(f"`{value}` must be more than zero", param, ctx)
        return seconds


class Headers(click.ParamType):
    """Click type for an HTTP header `NAME:VALUE`, returned as a pair."""

    name = "header"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, colon, content = value.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name.strip()) or not content.strip().isprintable():
            self.fail(f"`{value}` is not a header; write NAME:VALUE", param, ctx)
        return name.strip(), content.strip()


class ApiKey(click.ParamType):
    """Click type for an API key. It strips line ends (keys often come from files) and never prints the
    key."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        key = str(value).strip()
        if not key.isascii() or not key.isprintable():
            self.fail("the key contains characters that are not allowed in a header", param, ctx)
        return key


class Bodies(click.ParamType):
    """Click type for a body field `FIELD=JSON`. A value that is not JSON is taken as a string."""

    name = "field"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, content = value.partition("=")
        if not equals or not name.strip():
            self.fail(f"`{value}` is not a body field; write FIELD=JSON", param, ctx)
        if name.strip() == "max_tokens" and content.strip() != "null":
            self.fail("max_tokens comes from the plan; only `max_tokens=null` is allowed here", param, ctx)
        try:
            return name.strip(), json.loads(content)
        except ValueError:
            return name.strip(), content


class SloOf(click.ParamType):
    """Click type for an SLO with an optional class, `chat:ttft=500ms`.

    The value is (class or None, SloTarget).
    """

    name = "slo"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str | None, SloTarget]:
        if isinstance(value, tuple):
            return value
        name, colon, terms = value.rpartition(":")
        try:
            return (name.strip() if colon else None), SloTarget.parse(terms)
        except LoadgenError as error:
            self.fail(str(error), param, ctx)


class SloScales(click.ParamType):
    """Click type for a list of SLO scales, `1,3:6`, returned as a tuple without duplicates."""

    name = "scales"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[SloScale, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(SloScale.parse(part) for part in str(value).split(",")))
        except LoadgenError as error:
            self.fail(str(error), param, ctx)


class Above(click.ParamType):
    """Click type for a finite number above a bound."""

    name = "number"

    def __init__(self, above: float) -> None:
        self._above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"`{value}` is not a number", param, ctx)
        if not self._above < number < float("inf"):
            self.fail(f"`{value}` must be above {self._above:g}", param, ctx)
        return number


class Numbers(click.ParamType):
    """Click type for a list of numbers, `90,99`, returned as a tuple without duplicates.

    Each number must lie between the two bounds (exclusive) and is divided by `of`.
    """

    name = "numbers"

    def __init__(self, above: float, below: float = float("inf"), of: float = 1.0) -> None:
        self._above = above
        self._below = below
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        found: list[float] = []
        for part in str(value).split(","):
            try:
                number = float(part)
            except ValueError:
                self.fail(f"`{part}` is not a number", param, ctx)
            if not self._above < number < self._below:
                self.fail(f"`{part.strip()}` must be above {self._above:g} and below {self._below:g}", param, ctx)
            found.append(number / self._of)
        return tuple(dict.fromkeys(found))
