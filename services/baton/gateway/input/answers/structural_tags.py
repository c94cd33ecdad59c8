"""Reads vLLM's structural tags: free text in which some texts begin content that follows a schema."""

from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES, printable
from baton.gateway.constraints.answer_constraint import (
    ContentRule,
    GrammarRule,
    JsonRule,
    RegexRule,
    StructuredTag,
    TagsRule,
)
from baton.gateway.input import field_policy
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_reader import as_object, check_fields
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.schemas.schema_reader import MAX_PATTERN_CHARACTERS, read_schema

MAX_TAGS = 128
"""Most tags, and most triggers."""
MAX_TAG_CHARACTERS = 1024
"""Longest text that begins or ends a tag."""


def parse_tags(place: str, tag: Mapping[str, Any], unknown: UnknownFields) -> TagsRule:
    """Return the rule of a structural tag, and report unknown fields. `place` names it in errors.

    Its older form has `structures` and `triggers`. The newer one has a `format`, of which triggered tags are
    implemented. The fields of `tag` itself are checked by the caller. Raises InvalidField.
    """
    reader = _TagReader(unknown)
    if tag.get("format") is None:
        items, name, read = tag.get("structures"), "structures", reader.older
        flags = {}
    else:
        place = f"{place}.format"
        tag = as_object(place, tag["format"])
        reader.check_format(place, tag)
        items, name, read = tag.get("tags"), "tags", reader.newer
        flags = {flag: _flag(f"{place}.{flag}", tag.get(flag)) for flag in ("at_least_one", "stop_after_first")}
    triggers = [_text(at, trigger) for at, trigger in _items(f"{place}.triggers", tag.get("triggers"))]
    tags = [read(at, as_object(at, item)) for at, item in _items(f"{place}.{name}", items)]
    for number, found in enumerate(tags):
        if not any(found.begin.startswith(trigger) for trigger in triggers):
            at = f"{place}.{name}[{number}].begin"
            raise InvalidField(at, f"{at} is {printable(found.begin)}; must begin with one of the triggers")
    return TagsRule(tags=tags, triggers=triggers, **flags)


class _TagReader:
    """Reads tags of both forms, and reports the unknown fields of one request to `unknown`."""

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown

    def check_format(self, place: str, found: Mapping[str, Any]) -> None:
        if found.get("type") != "triggered_tags":
            at = f"{place}.type"
            message = f"{at} is {printable(found.get('type'))}; only 'triggered_tags' is implemented"
            raise InvalidField(at, message, Reason.UNSUPPORTED_FIELD)
        check_fields(found, field_policy.TAG_FORMAT, self._unknown, f"{place}.")

    def older(self, at: str, item: Mapping[str, Any]) -> StructuredTag:
        check_fields(item, field_policy.STRUCTURES, self._unknown, f"{at}.")
        return _tag(at, item, _json(f"{at}.schema", item.get("schema")))

    def newer(self, at: str, item: Mapping[str, Any]) -> StructuredTag:
        check_fields(item, field_policy.TAGS, self._unknown, f"{at}.")
        return _tag(at, item, self._content(f"{at}.content", as_object(f"{at}.content", item.get("content"))))

    def _content(self, at: str, item: Mapping[str, Any]) -> ContentRule:
        check_fields(item, field_policy.TAG_CONTENT, self._unknown, f"{at}.")
        kind = item.get("type")
        if kind == "json_schema":
            return _json(f"{at}.json_schema", item.get("json_schema"))
        if kind == "regex":
            return RegexRule(_text(f"{at}.pattern", item.get("pattern"), most=MAX_PATTERN_CHARACTERS), f"{at}.pattern")
        if kind == "grammar":
            return GrammarRule(_text(f"{at}.grammar", item.get("grammar"), most=MAX_GRAMMAR_BYTES), f"{at}.grammar")
        message = f"{at}.type is {printable(kind)}; must be 'json_schema', 'regex' or 'grammar'"
        raise InvalidField(f"{at}.type", message, Reason.UNSUPPORTED_FIELD)


def _tag(at: str, item: Mapping[str, Any], content: ContentRule) -> StructuredTag:
    return StructuredTag(_text(f"{at}.begin", item.get("begin")), content, _text(f"{at}.end", item.get("end"), 0))


def _json(at: str, value: object) -> JsonRule:
    return JsonRule(schema=read_schema(at, as_object(at, value)), place=at)


def _items(place: str, value: object) -> list[tuple[str, Any]]:
    """Return the items of a list with their places."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
        what = f"a list of {len(value)} items" if isinstance(value, list) else printable(value)
        raise InvalidField(place, f"{place} is {what}; must be a list of 1 to {MAX_TAGS} items")
    return [(f"{place}[{number}]", item) for number, item in enumerate(value)]


def _flag(at: str, value: object) -> bool:
    if not isinstance(value, bool | None):
        raise InvalidField(at, f"{at} is {printable(value)}; must be true or false")
    return bool(value)


def _text(at: str, value: object, least: int = 1, most: int = MAX_TAG_CHARACTERS) -> str:
    if not isinstance(value, str) or len(value) < least or len(value) > most:
        raise InvalidField(at, f"{at} is {printable(value)}; must be a string of {least} to {most:,} characters")
    return value
