"""Writes grammars in llguidance's dialect of Lark.

An added token of the tokenizer is written as its id, so that ordinary tokens cannot spell it. Text before it
excludes its characters, so that the token cannot be text either.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.gateway.output.formats import SpecialToken
from baton.gateway.output.special_text import split_special

WHITESPACE = r"(?: {0,2}|\r?\n[ \t]{0,30})"
"""White space between two parts of JSON: at most two spaces, or a new line with an indent. It is bounded,
because some models write it without end."""
_HEADER = "%llguidance {}"
_SLASHED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_META = re.compile(r"[\\.+*?()|\[\]{}^$&~#/-]")


class LarkWriter:
    """Collects the rules of one grammar. Methods return expressions for other rules."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """Create a writer. `token_ids` are the ids of the tokenizer's added tokens by their text."""
        self._token_ids = token_ids
        self._names: dict[str, str] = {}
        self._rules: list[str] = []
        self._nested: list[str] = []

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

    def free_text(self, *excluded: str) -> str:
        """Return an expression for any text without these texts, which may be empty."""
        contains = "".join(f" & ~/(?s:.*){_escaped(text)}(?s:.*)/" for text in excluded)
        return self._terminal(f"/(?s:.*)/{contains}")

    def text_until(self, end: str, min_length: int = 0, max_length: int | None = None) -> str:
        """Return an expression for any text of a length in characters up to `end`, and for `end` itself."""
        is_free = not min_length and max_length is None
        bounds = "*" if is_free else f"{{{min_length},{'' if max_length is None else max_length}}}"
        pieces = split_special(end, self._token_ids)
        if isinstance(pieces[0], SpecialToken):
            text = self._terminal(f"/(?s:.{bounds})/ & ~/(?s:.*){_escaped(pieces[0].text)}(?s:.*)/")
            return f"{text} {self.text(end)}"
        first = pieces[0]
        rest = self.text(end[len(first) :])
        return f"{self.rule(f'/(?s:.{bounds}){_escaped(first)}/', '[lazy]')} {rest}".rstrip()

    def json(
        self, schema: Mapping[str, Any], *, lenient: bool, whitespace: str | None = WHITESPACE, coerce: bool = True
    ) -> str:
        """Return an expression for JSON of a schema. Raises nothing: llguidance checks the schema.

        lenient: parts of the schema that are not supported are ignored.
        whitespace: regular expression for the space between tokens; None allows none.
        coerce: `oneOf` allows values of several of its schemas where llguidance cannot tell them apart.
        """
        spaces = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
        options = spaces | {"coerce_one_of": coerce, "lenient": lenient}
        text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))
        return self.rule(f"%json {text}")

    def regex(self, pattern: str) -> str:
        """Return an expression for text that a regular expression matches."""
        return self._terminal(f"/{_in_slashes(pattern)}/" if pattern else '""')

    def one_of(self, texts: Sequence[str]) -> str:
        """Return an expression for one of some fixed texts, which are never special tokens."""
        return self._terminal(" | ".join(map(json.dumps, texts)))

    def nested(self, grammar: str) -> str:
        """Return an expression for the text of another grammar."""
        self._nested.append(grammar)
        return f"@nested{len(self._nested) - 1}"

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
            self._rules.append(f"{name}{attributes}: {expression}")
        return known

    def grammar(self, start: str) -> str:
        """Return the grammar whose start rule is this expression."""
        if start == "@nested0" and not self._rules:
            return self._nested[0]
        text = "\n".join((_HEADER, f"start: {start}", *self._rules, ""))
        if not self._nested:
            return text
        grammars = [{"name": "answer", "lark_grammar": text}]
        grammars += [{"name": f"nested{n}", "lark_grammar": nested} for n, nested in enumerate(self._nested)]
        return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def _escaped(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return _META.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _in_slashes(pattern: str) -> str:
    """Return a regular expression that may stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: _SLASHED.get(found.group(), found.group()), pattern, flags=re.DOTALL)
