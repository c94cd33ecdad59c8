"""Parses the text of a region to a value, as a response template says."""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from baton.gateway.output.special_text import special_text
from baton.gateway.output.templates.pattern import Pattern
from baton.gateway.output.templates.pattern_scan import Match, MatchFinder

Arguments = Mapping[str, Any]

_BARE_KEY = re.compile(r"(?<=[{,])(\w+):")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_SENTINEL = re.compile("\x01([0-9]+)\x02")


def _text(text: str, args: Arguments) -> str:
    return text.strip() if args.get("strip", True) else text


def _bool(text: str, args: Arguments) -> bool:
    return _text(text, args).lower() in ("true", "1")


def _json(text: str, args: Arguments) -> Any:
    """Parse JSON, or a dialect with bare keys and other delimiters around strings."""
    delimiters = args.get("string_delims", [])
    if delimiters and ("\x01" in text or "\x02" in text):
        raise ValueError("the text contains reserved control characters")
    strings: list[str] = []
    working = text
    for begin, end in delimiters:
        working = _take_strings(working, begin, end, strings)
    if args.get("unquoted_keys", False):
        working = _BARE_KEY.sub(r'"\1":', working)
    if strings:
        working = _SENTINEL.sub(lambda found: json.dumps(strings[int(found.group(1))]), working)
    try:
        return json.loads(working)
    except (ValueError, RecursionError) as error:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise ValueError(str(error)) from error


def _take_strings(text: str, begin: str, end: str, strings: list[str]) -> str:
    """Replace delimited strings by their numbers in `strings`."""
    parts: list[str] = []
    position = 0
    while (start := text.find(begin, position)) >= 0 and (stop := text.find(end, start + len(begin))) >= 0:
        parts += [text[position:start], f"\x01{len(strings)}\x02"]
        strings.append(text[start + len(begin) : stop])
        position = stop + len(end)
    return "".join([*parts, text[position:]])


def _nested(text: str, args: Arguments) -> Any:
    parser = args.get("value_parser")
    return text if parser is None else parse_content(text, parser.get("name", "text"), parser.get("args", {}))


@lru_cache(maxsize=64)
def _tag_pattern(source: str) -> Pattern:
    return Pattern(source, special_text((), frozenset()))


class TagParser:
    """Parses tags to an object. The search goes on while the text arrives, because it takes time.

    The pattern of the tags has the groups `key` and `value`.
    """

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._finder = MatchFinder(_tag_pattern(args["tag_pattern"]))

    def put(self, text: str) -> None:
        """Add text."""
        self._finder.put(text)

    def finish(self) -> dict[str, Any]:
        """Return the object."""
        return _tag_values(self._finder.finish(), self._args)


def _xml_inline(text: str, args: Arguments) -> dict[str, Any]:
    parser = TagParser(args)
    parser.put(text)
    return parser.finish()


def _tag_values(matches: list[Match], args: Arguments) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for found in matches:
        key, value = found.groups["key"], _nested(found.groups.get("value", ""), args)
        if key in values and args.get("merge_duplicates", False):
            if not isinstance(values[key], list):
                values[key] = [values[key]]
            values[key].append(value)
        else:
            values[key] = value
    return values


def _kv_lines(text: str, args: Arguments) -> dict[str, Any]:
    """Parse lines of a key and a value."""
    values: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            values[_text(key, args)] = _nested(_text(value, args), args)
    return values


CONTENT_PARSERS: Mapping[str, Callable[[str, Arguments], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": _bool,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
"""Content parsers by name. They raise ValueError or KeyError for text that they cannot parse."""


def parse_content(text: str, name: str, args: Arguments) -> Any:
    """Parse a region's text with the parser of this name."""
    return CONTENT_PARSERS[name](text, args)


def transformed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Fill the placeholders of a transform. `{content.name}` looks up a key of the value `content`.

    Raises KeyError or TypeError if a placeholder has no value.
    """
    if isinstance(transform, Mapping):
        return {key: transformed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [transformed(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found.group(1).split("."):
        value = value[key]
    return value
