"""Kinds of values on the command line."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from loadgen import text_forms
from loadgen.loadgen_errors import LoadgenError
from loadgen.slo_target import SloTarget

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Seconds(click.ParamType):
    """`300ms`, `5s`, `2m`: seconds above zero."""

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
    """`name: value`, as one pair."""

    name = "header"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, colon, content = value.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name.strip()) or not content.strip().isprintable():
            self.fail(f"`{value}` is no header: write NAME:VALUE", param, ctx)
        return name.strip(), content.strip()


class ApiKey(click.ParamType):
    """Without the line's end that comes with keys from files. Never repeated in a message."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        key = str(value).strip()
        if not key.isascii() or not key.isprintable():
            self.fail("the key has characters that no header can carry", param, ctx)
        return key


class Bodies(click.ParamType):
    """`field=json`; what is no JSON is a text."""

    name = "field"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, content = value.partition("=")
        if not equals or not name.strip():
            self.fail(f"`{value}` is no field: write FIELD=JSON", param, ctx)
        if name.strip() == "max_tokens" and content.strip() != "null":
            self.fail("how long answers are is said by the plan", param, ctx)
        try:
            return name.strip(), json.loads(content)
        except ValueError:
            return name.strip(), content


class SloOf(click.ParamType):
    """`ttft=500ms,tpot=50ms`, or with a class before it, `chat:ttft=500ms`; as (class or None, Slo)."""

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


class Above(click.ParamType):
    """A finite number above a bound."""

    name = "number"

    def __init__(self, above: float) -> None:
        self._above = above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"`{value}` is no number", param, ctx)
        if not self._above < number < float("inf"):
            self.fail(f"`{value}` must be above {self._above:g}", param, ctx)
        return number


class Numbers(click.ParamType):
    """`90,99`: numbers between two bounds (excluded), each divided by `of`; as a tuple, none twice."""

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
                self.fail(f"`{part}` is no number", param, ctx)
            if not self._above < number < self._below:
                self.fail(f"`{part.strip()}` must be above {self._above:g} and below {self._below:g}", param, ctx)
            found.append(number / self._of)
        return tuple(dict.fromkeys(found))
