"""Writes grammars in llguidance's dialect of Lark.

An added token of the tokenizer is written as its id, so that ordinary tokens cannot spell it. Text before it
excludes its characters, so that the token cannot be text either.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.string_rules import NO_RULES, StringRules
from baton.gateway.output.formats import SpecialToken
from baton.gateway.output.special_text import split_special

WHITESPACE = r"(?: {0,2}|\r?\n[ \t]{0,30})"
"""White space between two parts of JSON: at most two spaces, or a new line with an indent. It is bounded,
because some models write it without end."""
_HEADER = "%llguidance {}"
_REFERENCE = re.compile(r'"\$ref":"#(?:/(\$defs|definitions)/([^"/\\~%]+))?')
_MAX_CHARACTERS = 4 * MAX_GRAMMAR_BYTES
"""Characters of expressions, some of which are counted in several rules."""
_MAX_JSON_CHARACTERS = 64 * MAX_GRAMMAR_BYTES
"""Characters of schemas, of which equal ones share a rule."""
_TOO_LARGE = f"the grammar has more than {MAX_GRAMMAR_BYTES:,} bytes; send less"
_SLASHED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$&~#/-]")


@dataclass(frozen=True, slots=True)
class WrittenGrammar:
    """A grammar in canonical form; an empty text if there is none.

    places: names of the parts of a request from which rules were made, by rule. Errors name them.
    """

    text: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


class LarkWriter:
    """Collects the rules of one grammar. Methods return expressions for other rules."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """Create a writer. `token_ids` are the ids of the tokenizer's added tokens by their text.

        places: see `WrittenGrammar`.
        """
        self._token_ids = token_ids
        self._names: dict[str, str] = {}
        self._rules: list[str] = []
        self._nested: list[str] = []
        self._num_reserved = 0
        self.places: dict[str, str] = {}
        self._num_characters = self._num_json_characters = 0
        self._with_definitions: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return an expression for a fixed text."""
        parts = [
            f"<[{self._token_ids[piece.text]}]>" if isinstance(piece, SpecialToken) else json.dumps(piece)
            for piece in split_special(text, self._token_ids)
        ]
        return " ".join(parts)

    def begins_with_token(self, text: str) -> bool:
        """True if a text begins with an added token."""
        pieces = split_special(text, self._token_ids)
        return bool(pieces) and isinstance(pieces[0], SpecialToken)

    def has_token(self, text: str) -> bool:
        """True if a text has an added token."""
        return any(isinstance(piece, SpecialToken) for piece in split_special(text, self._token_ids))

    def free_text(self, *excluded: str, patterns: Sequence[str] = ()) -> str:
        """Return an expression for any text without these texts, which may be empty.

        patterns: regular expressions that the whole text must not match.
        """
        contains = f" & ~/(?s:.*)({'|'.join(map(escaped, excluded))})(?s:.*)/" if excluded else ""
        contains += "".join(f" & ~/{_in_slashes(each)}/" for each in patterns)
        return self._terminal(f"/(?s:.*)/{contains}")

    def text_until(
        self,
        end: str,
        rules: StringRules = NO_RULES,
        excluded: Sequence[str] = (),
        place: str = "",
    ) -> str:
        """Return an expression for any text of these rules up to `end`, and for `end` itself.

        excluded: regular expressions that the whole text must not match.
        place: place of the rules in the request.
        """
        min_length, max_length = rules.least, rules.most
        is_free = not min_length and max_length is None
        bounds = "*" if is_free else f"{{{min_length},{'' if max_length is None else max_length}}}"
        more = "".join(f" & /{_in_slashes(each)}/" for each in rules.patterns)
        more += "".join(f" & ~/{_in_slashes(each)}/" for each in excluded)
        pieces = split_special(end, self._token_ids)
        if isinstance(pieces[0], SpecialToken):
            text = self._terminal(f"/(?s:.{bounds})/ & ~/(?s:.*){escaped(pieces[0].text)}(?s:.*)/{more}")
            return f"{self._placed(text, place)} {self.text(end)}"
        first = pieces[0]
        rest = self.text(end[len(first) :])
        whole = f"(/(?s:.{bounds})/{more}) {json.dumps(first)}" if more else f"/(?s:.{bounds}){escaped(first)}/"
        if len(pieces) > 1:  # the special token that follows tells where the text ends
            return f"{self._placed(self._terminal(whole), place)} {rest}"
        return f"{self._placed(self.rule(whole, '[lazy]'), place)} {rest}".rstrip()

    def key(self, key: str, matching: Sequence[str] = (), excluded: Sequence[str] = ()) -> str:
        """Return an expression for a key: a literal or a regular expression between slashes.

        matching, excluded: regular expressions that the whole key must match, or must not match.
        """
        rules = [f"/{_in_slashes(each)}/" for each in matching] + [f"~/{_in_slashes(each)}/" for each in excluded]
        return self._terminal(" & ".join((key, *rules))) if rules else key

    def json(
        self,
        schema: Mapping[str, Any],
        *,
        lenient: bool,
        whitespace: str | None = WHITESPACE,
        coerce: bool,
        definitions: Mapping[str, Any] | None = None,
        place: str = "",
    ) -> str:
        """Return an expression for JSON of a schema, which llguidance checks when the grammar is compiled.

        Raises GrammarTextError if the grammar will be too large.

        lenient: parts of the schema that are not supported are ignored.
        whitespace: regular expression for the space between tokens; None allows none.
        coerce: `oneOf` allows values of several of its schemas where llguidance cannot tell them apart.
        definitions: schema of which the schema is a part, and whose definitions it may refer to.
        """
        spaces = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
        options = spaces | {"coerce_one_of": coerce, "lenient": lenient}
        text = _dumps({**schema, "x-guidance": options})
        if definitions is not None and '"$ref":' in text:
            known = self._with_definitions.get(text)
            if known is None:
                used = _used_definitions(text, definitions)
                known = self._with_definitions[text] = _dumps({**schema, **used, "x-guidance": options})
            text = known
        self._num_json_characters += len(text)
        if self._num_json_characters > _MAX_JSON_CHARACTERS:
            raise GrammarTextError(_TOO_LARGE)
        return self._placed(self.rule(f"%json {text}"), place)

    def regex(self, pattern: str, place: str = "") -> str:
        """Return an expression for text that a regular expression matches."""
        return self._placed(self._terminal(f"/{_in_slashes(pattern)}/" if pattern else '""'), place)

    def one_of(self, texts: Sequence[str]) -> str:
        """Return an expression for one of some fixed texts, which are never special tokens."""
        return self._terminal(" | ".join(map(json.dumps, texts)))

    def counted(self, expression: str) -> str:
        """Return an expression that becomes part of a rule.

        Raises GrammarTextError if all of them are so long that the grammar will be too large.
        """
        self._num_characters += len(expression)
        if self._num_characters > _MAX_CHARACTERS:
            raise GrammarTextError(_TOO_LARGE)
        return expression

    def nested(self, grammar: str, place: str = "") -> str:
        """Return an expression for the text of another grammar."""
        self._nested.append(grammar)
        return "@" + self._placed(f"nested{len(self._nested) - 1}", place)

    def reserve(self) -> str:
        """Return the name for a rule that is added later as `fixed_rule`."""
        self._num_reserved += 1
        return f"reserved{self._num_reserved}"

    def rule(self, expression: str, attributes: str = "") -> str:
        """Return the name of a rule for an expression. Equal ones share it."""
        return self._named(f"r{len(self._rules)}", attributes, expression)

    def fixed_rule(self, name: str, expression: str) -> None:
        """Add a rule with a name of its own, which other rules may refer to. A name is added once."""
        if name not in self._names:
            self._names[name] = name
            self._rules.append(f"{name}: {expression}")

    def _terminal(self, expression: str) -> str:
        return self._named(f"T{len(self._rules)}", "", expression)

    def _named(self, name: str, attributes: str, expression: str) -> str:
        known = self._names.setdefault(f"{attributes}: {expression}", name)
        if known == name:
            self._rules.append(self.counted(f"{name}{attributes}: {expression}"))
        return known

    def _placed(self, name: str, place: str) -> str:
        """Note the part of a request that a rule comes from, if that is not the whole constraint."""
        if place:
            self.places.setdefault(name, place)
        return name

    def forget_definitions(self) -> None:
        """Forget the definitions of the last tool's schema."""
        self._with_definitions.clear()

    def grammar(self, start: str) -> WrittenGrammar:
        """Return the grammar whose start rule is this expression."""
        return WrittenGrammar(self._text(start), self.places)

    def _text(self, start: str) -> str:
        if start == "@nested0" and not self._rules:
            return self._nested[0]
        text = "\n".join((_HEADER, f"start: {start}", *self._rules, ""))
        if not self._nested:
            return text
        grammars = [{"name": "answer", "lark_grammar": text}]
        grammars += [{"name": f"nested{n}", "lark_grammar": nested} for n, nested in enumerate(self._nested)]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _used_definitions(text: str, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions of `root` that the JSON of a schema refers to, directly or not.

    All of them, if a reference has another form than `#/$defs/NAME`.
    """
    found: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    waiting = [text]
    while waiting:
        for place, name in _REFERENCE.findall(waiting.pop()):
            group = root.get(place)
            if not isinstance(group, Mapping) or name not in group:
                return {place: root[place] for place in found if place in root}
            if name not in found[place]:
                found[place][name] = group[name]
                waiting.append(_dumps({"": group[name]}))
    return {place: definitions for place, definitions in found.items() if definitions}


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def any_of(expressions: Iterable[str]) -> str:
    """Return an expression for one of several, of which empty ones are left out; empty if there is none."""
    found = [each for each in dict.fromkeys(expressions) if each]
    return f"({' | '.join(found)})" if found else ""


def escaped(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return _META.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _in_slashes(pattern: str) -> str:
    """Return a regular expression that may stand between slashes. Two slashes begin a comment."""
    slashed = re.sub(r"\\.|/|\n", lambda found: _SLASHED.get(found.group(), found.group()), pattern, flags=re.DOTALL)
    return slashed or "(?:)"
