"""Loads the declarative `response_template` that tokenizer_config.json may hold.

It describes fields of a message. Each is a region of the text between an opening and a closing delimiter. A
field without an opening delimiter takes the text between the other regions. The format is that of
`transformers.utils.chat_parsing`, version 1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from baton.core.errors import ModelError
from baton.gateway.output.special_text import SpecialText, special_text
from baton.gateway.output.templates.content_parsers import CONTENT_PARSERS
from baton.gateway.output.templates.pattern import Pattern

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join"}
_FIELD_KEYS |= {"optional", "transform", "transform_each"}
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTemplate:
    """A field of the message.

    open, close: patterns of the delimiters; empty if there is none.
    content, content_args: content parser of the region's text, and its arguments.
    join: stands between the texts of several regions; None if they are not joined.
    transform: shape of the value, with placeholders; None leaves it as it is.
    transform_each: the value is a list, and each of its items is transformed.
    """

    name: str
    open: str
    close: str
    content: str
    content_args: Mapping[str, Any]
    join: str | None
    transform: Any
    transform_each: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseTemplate:
    """A validated response template. A prompt begins the message after the pattern `start_anchor`."""

    fields: tuple[FieldTemplate, ...]
    start_anchor: str

    def compiled(self, special_tokens: frozenset[str]) -> "CompiledTemplate":
        """Return the template for a tokenizer. All parsers share it."""
        return _compiled(self, special_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledTemplate:
    """A response template whose patterns know the tokenizer's special tokens."""

    special: SpecialText
    fields: tuple[FieldTemplate, ...]
    opens: Mapping[str, Pattern] = field(default_factory=dict)
    closes: Mapping[str, Pattern] = field(default_factory=dict)
    start_anchor: re.Pattern[str]

    @property
    def implicit(self) -> FieldTemplate | None:
        """The field that takes the text between the other regions."""
        return next((field for field in self.fields if not field.open), None)


def load_response_template(template: Any) -> ResponseTemplate:
    """Validate a response template. Raises ModelError with the field and the problem."""
    if not isinstance(template, Mapping):
        raise _invalid("is not an object")
    if template.get("version", 1) != 1:
        raise _invalid(f"has version {template['version']}; only 1 is supported")
    _check_keys("it", template, _TEMPLATE_KEYS)
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise _invalid("has no `fields`")
    loaded = ResponseTemplate(
        fields=tuple(_field(name, value) for name, value in fields.items()),
        start_anchor=_anchor("it", template, "start_anchor"),
    )
    if not loaded.start_anchor:
        raise _invalid("has neither `start_anchor` nor `start_anchor_pattern`")
    if sum(not field.open for field in loaded.fields) > 1:
        raise _invalid("has more than one field without `open`")
    loaded.compiled(frozenset())
    return loaded


def _invalid(problem: str) -> ModelError:
    return ModelError(
        f"the `response_template` of tokenizer_config.json {problem}; correct it, or choose formats with "
        "--tool-parser and --reasoning-parser"
    )


def _check_keys(where: str, value: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(value) - known):
        raise _invalid(f"is invalid: {where} has the unknown keys {', '.join(unknown)}")


def _field(name: str, value: Any) -> FieldTemplate:
    where = f"field {name!r}"
    if not isinstance(value, Mapping):
        raise _invalid(f"is invalid: {where} is not an object")
    _check_keys(where, value, _FIELD_KEYS)
    content = value.get("content", "text")
    if content not in CONTENT_PARSERS:
        raise _invalid(f"is invalid: {where} has the unknown content parser {content!r}")
    join, transform, each = value.get("join"), value.get("transform"), value.get("transform_each", False)
    if join is not None and not (isinstance(join, str) and value.get("repeats")):
        raise _invalid(f"is invalid: `join` of {where} must be a string and needs `repeats`")
    if not isinstance(each, bool) or (each and transform is None):
        raise _invalid(f"is invalid: `transform_each` of {where} must be a boolean and needs `transform`")
    if not isinstance(value.get("content_args", {}), Mapping):
        raise _invalid(f"is invalid: `content_args` of {where} is not an object")
    _check_transform(where, transform)
    if content == "xml-inline":
        _check_tags(where, value.get("content_args", {}))
    return FieldTemplate(
        name=name,
        open=_anchor(where, value, "open"),
        close=_anchor(where, value, "close"),
        content=content,
        content_args=value.get("content_args", {}),
        join=join,
        transform=transform,
        transform_each=each,
    )


def _check_tags(where: str, args: Mapping[str, Any]) -> None:
    """Raise ModelError if the pattern of tags is invalid."""
    source = args.get("tag_pattern")
    pattern = Pattern(source, special_text((), frozenset())) if isinstance(source, str) else None
    if pattern is None or "key" not in pattern.group_names or pattern.is_empty_inside:
        raise _invalid(f"is invalid: `tag_pattern` of {where} must be a pattern with the group `key`")


def _check_transform(where: str, transform: Any) -> None:
    """Raise ModelError if a string mixes a placeholder with other text."""
    if isinstance(transform, Mapping):
        transform = list(transform.values())
    if isinstance(transform, list):
        for item in transform:
            _check_transform(where, item)
    elif isinstance(transform, str) and _PLACEHOLDER.search(transform) and not _PLACEHOLDER.fullmatch(transform):
        raise _invalid(f"is invalid: `transform` of {where} mixes a placeholder with text: {transform!r}")


def _anchor(where: str, value: Mapping[str, Any], key: str) -> str:
    """Return a delimiter, which may be a string, a list of strings or a pattern, as a pattern."""
    if key in value and f"{key}_pattern" in value:
        raise _invalid(f"is invalid: {where} has both `{key}` and `{key}_pattern`")
    if f"{key}_pattern" in value:
        if not isinstance(pattern := value[f"{key}_pattern"], str) or not pattern:
            raise _invalid(f"is invalid: `{key}_pattern` of {where} is not a pattern")
        return pattern
    if key not in value:
        return ""
    literals = value[key] if isinstance(value[key], list) else [value[key]]
    if not literals or not all(isinstance(literal, str) and literal for literal in literals):
        raise _invalid(f"is invalid: `{key}` of {where} must be a string or a list of strings, none of them empty")
    return "|".join(re.escape(literal) for literal in sorted(set(literals), key=lambda text: (-len(text), text)))


@lru_cache(maxsize=16)
def _compiled(template: ResponseTemplate, special_tokens: frozenset[str]) -> CompiledTemplate:
    texts = [text for field in template.fields for text in (field.open, field.close) if text]
    delimiters = [delimiter for field in template.fields for delimiter in string_delimiters(field)]
    special = special_text((*(re.sub(r"\\(.)", r"\1", text) for text in texts), *delimiters), special_tokens)
    opens = {field.name: Pattern(field.open, special) for field in template.fields if field.open}
    closes = {field.name: Pattern(field.close, special) for field in template.fields if field.close}
    for pattern in (*opens.values(), *closes.values()):
        if pattern.is_empty_inside:
            raise _invalid(f"is invalid: the pattern {pattern.source!r} matches empty text")
    try:
        anchor = re.compile(template.start_anchor, re.DOTALL)
    except re.error as error:
        raise _invalid(f"is invalid: `start_anchor_pattern`: {error}") from error
    return CompiledTemplate(special=special, fields=template.fields, opens=opens, closes=closes, start_anchor=anchor)


def string_delimiters(field: FieldTemplate) -> tuple[str, ...]:
    """Return the delimiters of strings in a field's JSON dialect."""
    pairs = field.content_args.get("string_delims", [])
    return tuple(text for pair in pairs for text in pair if isinstance(text, str)) if isinstance(pairs, list) else ()
