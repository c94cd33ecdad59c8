"""Writes grammars of constrained content: JSON, regular expressions, choices, grammars and tags."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from baton.gateway.constraints.gbnf import GrammarTextError, gbnf_to_lark
from baton.gateway.constraints.lark_writer import WHITESPACE, LarkWriter
from baton.gateway.output.formats import ContentForm

_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:[^:])", re.MULTILINE)


class ContentRule(Protocol):
    """A rule for content."""

    @property
    def form(self) -> ContentForm:
        """Form of the content."""
        return ContentForm.EXACT

    def expression(self, writer: LarkWriter) -> str:
        """Return an expression for the content. Raises GrammarTextError if the rule has an invalid text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRule:
    """JSON that matches a schema.

    whitespace: regular expression for the space between tokens; None writes none.
    lenient: parts of the schema that are not supported are ignored.
    place: its place in the request, if that has several rules.
    """

    schema: Mapping[str, Any]
    whitespace: str | None = WHITESPACE
    lenient: bool = False
    place: str = ""

    @property
    def form(self) -> ContentForm:
        return ContentForm.SPACED  # the first character of JSON is no white space

    def expression(self, writer: LarkWriter) -> str:
        return writer.json(
            self.schema, lenient=self.lenient, whitespace=self.whitespace, coerce=self.lenient, place=self.place
        )


@dataclass(frozen=True, slots=True)
class RegexRule(ContentRule):
    """Text that a regular expression matches as a whole."""

    pattern: str
    place: str = ""

    def expression(self, writer: LarkWriter) -> str:
        if (len(self.pattern) - len(self.pattern.rstrip("\\"))) % 2:
            raise GrammarTextError("the regular expression ends with a single backslash; write two, or none")
        return writer.regex(self.pattern, self.place)


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """One of some texts."""

    choices: tuple[str, ...]

    @property
    def form(self) -> ContentForm:
        begins_with_space = any(choice[:1].isspace() for choice in self.choices)
        return ContentForm.EXACT if begins_with_space else ContentForm.SPACED

    def expression(self, writer: LarkWriter) -> str:
        return writer.one_of(self.choices)


@dataclass(frozen=True, slots=True)
class GrammarRule(ContentRule):
    """Text of a grammar in Lark's syntax, or in GBNF."""

    grammar: str
    place: str = ""

    def expression(self, writer: LarkWriter) -> str:
        is_gbnf = _GBNF.search(self.grammar) is not None and _LARK.search(self.grammar) is None
        text = gbnf_to_lark(self.grammar) if is_gbnf else self.grammar.strip(" \t").rstrip() + "\n"
        return writer.nested(text, self.place)


@dataclass(frozen=True, slots=True)
class StructuredTag:
    """Content between two texts: a part of `TagsRule`."""

    begin: str
    content: ContentRule
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TagsRule:
    """Free text in which each trigger begins a tag, whose content follows its rule.

    at_least_one: there is a tag.
    stop_after_first: the text ends with the first tag.
    """

    tags: Sequence[StructuredTag]
    triggers: Sequence[str]
    at_least_one: bool = False
    stop_after_first: bool = False

    @property
    def form(self) -> ContentForm:
        return ContentForm.TAGGED

    def expression(self, writer: LarkWriter) -> str:
        rests: dict[str, list[str]] = {}
        for tag in self.tags:
            trigger = next(trigger for trigger in self.triggers if tag.begin.startswith(trigger))
            rest = (writer.text(tag.begin[len(trigger) :]), tag.content.expression(writer), writer.text(tag.end))
            rests.setdefault(trigger, []).append(" ".join(filter(None, rest)))
        tags = [f"{writer.text_until(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items()]
        one, text = f"({' | '.join(tags)})", writer.free_text(*self.triggers)
        if self.stop_after_first:
            return one if self.at_least_one else f"({one} | {text})"
        return f"{one}{'+' if self.at_least_one else '*'} {text}"


AnswerRule: TypeAlias = "JsonRule | RegexRule | ChoiceRule | GrammarRule | TagsRule"
