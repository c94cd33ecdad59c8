"""Converts grammars in GBNF, which is also called EBNF, to llguidance's dialect of Lark.

Rules without recursion become terminals, which llguidance matches much faster. The cost is linear in the
length of the text.
"""

import json
import re
from dataclasses import dataclass, field

from baton.core.errors import BatonError

MAX_NESTING = 64
"""Deepest nesting of parentheses."""
MAX_REPEAT = 10_000
"""Largest number in a repetition."""
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\n]*)+)
    |(?P<head>[A-Za-z0-9_-]+[ \t]*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*\d{1,6}[ ]*(?:,[ ]*(?:\d{1,6}[ ]*)?)?\})
    |(?P<other>[()|.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^xuU])")
_MEMBER = re.compile(rf"{_ESCAPE.pattern}|.", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_ROOT = "root"


class GrammarTextError(BatonError):
    """A grammar's text is invalid. The message says where."""


@dataclass(slots=True)
class _GbnfRule:
    """A rule: its Lark text, in which a tuple stands for the rule of this name."""

    parts: list[str | tuple[str]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {part[0] for part in self.parts if isinstance(part, tuple)}


def gbnf_to_lark(text: str) -> str:
    """Return a grammar in Lark's syntax. Raises GrammarTextError if the text is invalid."""
    rules = _parsed(text)
    if _ROOT not in rules:
        raise GrammarTextError("there is no rule 'root'; add one, with which the output begins")
    for name, rule in rules.items():
        if missing := sorted(used for used in rule.names if used not in rules):
            raise GrammarTextError(f"the rule {name!r} refers to {missing[0]!r}, which is not defined; define it")
    terminals = _terminals(rules)
    lark = {_ROOT: "start"}
    for number, name in enumerate(rules):
        if name != _ROOT:
            lark[name] = f"T{number}" if name in terminals else f"r{number}"
    lines = ["%llguidance {}"]
    for name, rule in sorted(rules.items(), key=lambda item: item[0] != _ROOT):  # the first line is the start rule
        parts = [lark[part[0]] if isinstance(part, tuple) else part for part in rule.parts]
        lines.append(f"{lark[name]}: {' '.join(parts)}")
    return "\n".join([*lines, ""])


def _parsed(text: str) -> dict[str, _GbnfRule]:
    """Return the rules of a text by name, in their order."""
    rules: dict[str, _GbnfRule] = {}
    rule: _GbnfRule | None = None
    depth, position = 0, 0
    can_repeat = is_empty = True
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise _error(text, position, "is not part of GBNF")
        kind, found = token.lastgroup, token.group()
        at, position = position, token.end()
        if kind == "space":
            continue
        if kind == "head":
            if depth or (rule is not None and is_empty and rule.parts):
                raise _error(text, at, "begins a rule inside of another rule")
            rule = _begin(rules, found[:-3].strip(), text, at)
            can_repeat, is_empty = False, True
            continue
        if rule is None:
            raise _error(text, at, "stands before the first rule; begin with root ::=")
        if kind == "repeat":
            if not can_repeat:
                raise _error(text, at, "repeats nothing")
            rule.parts[-1:] = [rule.parts[-1], _repeat(found, text, at)]
            can_repeat = False
            continue
        if found == "|" or found == ")":
            if is_empty:
                rule.parts.append('""')
            if found == ")" and not depth:
                raise _error(text, at, "closes no parenthesis")
        depth += (found == "(") - (found == ")")
        if depth > MAX_NESTING:
            raise _error(text, at, f"is nested more than {MAX_NESTING} levels deep")
        rule.parts.append((found,) if kind == "name" else _expression(found, text, at))
        can_repeat = found not in "(|"
        is_empty = found in "(|"
    return _ended(rules, rule, depth, is_empty=is_empty)


def _begin(rules: dict[str, _GbnfRule], name: str, text: str, at: int) -> _GbnfRule:
    if name in rules:
        raise _error(text, at, "defines a rule twice")
    if rules and not (last := next(reversed(rules.values()))).parts:
        last.parts.append('""')
    rules[name] = _GbnfRule()
    return rules[name]


def _ended(rules: dict[str, _GbnfRule], rule: _GbnfRule | None, depth: int, *, is_empty: bool) -> dict[str, _GbnfRule]:
    if depth:
        raise GrammarTextError("the last rule has an open parenthesis; close it")
    if rule is not None and is_empty:
        rule.parts.append('""')
    return rules


def _expression(found: str, text: str, at: int) -> str:
    if found == ".":
        return "/(?s:.)/"
    if found[0] == '"':
        return json.dumps(_unescaped(found[1:-1], text, at))
    if found[0] == "[":
        return _character_class(found, text, at)
    return found


def _character_class(found: str, text: str, at: int) -> str:
    """Return a class as a regular expression, in which each character but a range's hyphen is a number."""
    is_negated = found.startswith("[^")
    inner = found[1 + is_negated : -1]
    if not inner:
        raise _error(text, at, "is a class without characters")
    parts: list[str] = []
    for member in _MEMBER.finditer(inner):
        part = member.group()
        if part == "-" and 0 < member.start() < len(inner) - 1:
            parts.append("-")
        else:
            character = part if len(part) == 1 and part != "\\" else _unescaped(part, text, at)
            parts.append(f"\\x{{{ord(character):x}}}")
    return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"


def _unescaped(found: str, text: str, at: int) -> str:
    def character(match: re.Match[str]) -> str:
        code = match.group(1)
        if code[0] not in "xuU":
            return _LETTERS.get(code, code)
        number = int(code[1:], 16)
        if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
            raise _error(text, at, "has an escape that is no character")
        return chr(number)

    if "\\" not in found:
        return found
    if "\\" in _ESCAPE.sub("", found):
        raise _error(text, at, "has an invalid escape")
    return _ESCAPE.sub(character, found)


def _repeat(found: str, text: str, at: int) -> str:
    if any(int(number) > MAX_REPEAT for number in re.findall(r"\d+", found)):
        raise _error(text, at, f"repeats more than {MAX_REPEAT:,} times")
    return found.replace(" ", "")


def _terminals(rules: dict[str, _GbnfRule]) -> set[str]:
    """Return the names of the rules that refer to terminals only."""
    users: dict[str, list[str]] = {}
    open_names = {name: len(rule.names) for name, rule in rules.items()}
    for name, rule in rules.items():
        for used in rule.names:
            users.setdefault(used, []).append(name)
    found = [name for name, count in open_names.items() if not count and name != _ROOT]
    for name in found:  # grows
        for user in users.get(name, ()):
            open_names[user] -= 1
            if not open_names[user] and user != _ROOT:
                found.append(user)
    return set(found)


def _error(text: str, at: int, rule: str) -> GrammarTextError:
    line = text.count("\n", 0, at) + 1
    return GrammarTextError(f"line {line}: {text[at : at + 20]!a} {rule}")
