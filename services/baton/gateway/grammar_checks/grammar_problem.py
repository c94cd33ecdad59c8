"""Explains why llguidance refuses a grammar: in which rule, at which place of it, and what would help."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SOURCE = re.compile(r"\n +\d+ \| ")
_RULE = re.compile(r"([rT]\d+)(?:\[\w+\])?: (.*)")
_REGEX = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^+[ \^]*\nerror: (.*)", re.DOTALL)
_REQUIRED = re.compile(r"required (?:property '(?P<name>.*)'|item) is unsatisfiable", re.DOTALL)
_REFERENCE = re.compile(r"\s+while processing json-schema:\S*$")
_SCHEMA_ERROR = "failed to compile JSON schema: "
_HEADER = "%llguidance {}\nstart: "
_MAX_MESSAGE = 200
_MAX_POINTER = 80
_MAX_SEARCH_S = 0.2
_MESSAGES: tuple[tuple[str, str], ...] = (
    (
        r"min/maxProperties only supported.*",
        "minProperties and maxProperties are supported if all of properties are required",
    ),
    (r".*Regex is empty.*", "no text matches pattern, format and lengths together"),
    (r"Unsatisfiable schema: (.*)", r"no value can match: \1"),
    (
        r"oneOf constraints are not supported.*",
        "the schemas of oneOf must differ in their type, or in the constant value of a property; use anyOf instead",
    ),
    (r"patternProperty regexes (.*) and (.*) are not disjoint", r"patterns \1 and \2 match the same names; use one"),
    (r".*lookarounds not supported yet; .* in regex (.*)", r"\\b, and ^ or $ inside of \1, are not supported"),
    (r"Failed to generate regex for (integer|float) range: .*", "the bounds of the number are not supported"),
    (r".*Token range .*", "a token id is not in the model's vocabulary"),
    (r".*too many digits.*", "a number in the grammar has too many digits; round it"),
    (r".*(?:number of symbols|schema too large).*", "the grammar is too large; use fewer alternatives and references"),
    (
        r".*(?:lexer precomputation|fuel|too complex|too large|too many).*",
        "the grammar is too complex; use fewer, or simpler, expressions and tags",
    ),
    (r".*NoExtensionBias.*", "no text matches the grammar"),
    (r"panic: .*", "the grammar is too complex; simplify it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarProblem:
    """A grammar that cannot be used.

    message: the rule that it breaks.
    rule: name of the grammar's rule; empty if it is not known, or if the client wrote the whole grammar.
    where: place in the rule: a JSON pointer, a character, or a line.
    """

    message: str
    rule: str = ""
    where: str = ""


def explained(grammar: str, error: str, check: Callable[[str], str]) -> GrammarProblem:
    """Return the problem of a grammar.

    error: llguidance's message for it. check: returns llguidance's message for another grammar, empty if that
    is valid.
    """
    if grammar.startswith("{"):
        return _of_several(grammar, error, check)
    found = _POSITION.fullmatch(error)
    if found is None or not grammar.startswith(_HEADER):
        return GrammarProblem(message=_message(error), where=_line(found))
    lines = grammar.split("\n")
    number = int(found[1]) - 1
    rule = _RULE.fullmatch(lines[number]) if number < len(lines) else None
    if rule is None:
        return GrammarProblem(message=_message(error))
    text = _SOURCE.split(found[3])[0]
    if text.startswith(_SCHEMA_ERROR) and rule[2].startswith("%json "):
        return _of_schema(rule[1], json.loads(rule[2].removeprefix("%json ")), text.removeprefix(_SCHEMA_ERROR), check)
    message, where = _regex_message(text)
    return GrammarProblem(message=message, rule=rule[1], where=where)


def _of_several(grammar: str, error: str, check: Callable[[str], str]) -> GrammarProblem:
    """Return the problem of one of several grammars: the first that is invalid alone."""
    try:
        grammars = json.loads(grammar)["grammars"]
        nested = [(str(each["name"]), str(each["lark_grammar"])) for each in grammars]
    except (ValueError, KeyError, TypeError, RecursionError):
        return GrammarProblem(message=_message(error))
    for name, text in nested:
        if name != "answer" and (problem := check(text)):
            return GrammarProblem(message=_message(problem), rule=name, where=_line(_POSITION.fullmatch(problem)))
    first = dict(nested).get("answer", "")
    return explained(first, error, check) if first.startswith(_HEADER) else GrammarProblem(message=_message(error))


def _of_schema(rule: str, schema: dict[str, Any], error: str, check: Callable[[str], str]) -> GrammarProblem:
    search = _SchemaSearch(schema, check)
    where, node, error = search.failing(error)
    message, character = _regex_message(error)
    if character:
        keyword = "pattern" if "pattern" in node else "patternProperties" if "patternProperties" in node else ""
        return GrammarProblem(
            message=f"{character}: {message}", rule=rule, where=_short(f"{where}/{keyword}".rstrip("/"))
        )
    return GrammarProblem(message=message, rule=rule, where=_short(where))


class _SchemaSearch:
    """Finds the deepest subschema that fails alone with the same message as the whole schema."""

    def __init__(self, schema: dict[str, Any], check: Callable[[str], str]) -> None:
        self._shared: Mapping[str, Any] = schema.get("$defs", {})
        self._schema = {name: value for name, value in schema.items() if name != "$defs"}
        self._options = schema.get("x-guidance", {})
        self._check = check
        self._ends_s = time.process_time() + _MAX_SEARCH_S

    def failing(self, error: str) -> tuple[str, Mapping[str, Any], str]:
        """Return pointer and value of the subschema, and its message."""
        where, node = "", self._schema
        error = _REFERENCE.sub("", error)
        known: set[int] = set()
        while id(node) not in known:
            known.add(id(node))
            required = _REQUIRED.search(error)
            for pointer, child in self._children(where, node):
                if required is not None and not _is_part(pointer.removeprefix(where), required["name"]):
                    continue
                problem = self._error(child)
                if problem and (problem == error or required is not None):
                    where, node, error = pointer, child, problem
                    break
        return where, node, error

    def _error(self, schema: Mapping[str, Any]) -> str:
        if time.process_time() > self._ends_s:
            return ""
        alone = {**schema, "$defs": self._shared, "x-guidance": self._options}
        found = self._check(f"{_HEADER}r0\nr0: %json {json.dumps(alone, ensure_ascii=False)}\n")
        position = _POSITION.fullmatch(found)
        text = _SOURCE.split(position[3])[0] if position is not None else found
        return _REFERENCE.sub("", text.removeprefix(_SCHEMA_ERROR))

    def _children(self, where: str, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the subschemas of a schema with their pointers."""
        found: list[tuple[str, Any]] = []
        for name, value in node.items():
            if name in ("properties", "patternProperties"):
                found += [(f"{where}/{name}/{_step(key)}", item) for key, item in value.items()]
            elif name in ("allOf", "anyOf", "oneOf", "prefixItems"):
                found += [(f"{where}/{name}/{number}", item) for number, item in enumerate(value)]
            elif name in ("additionalProperties", "items"):
                found.append((f"{where}/{name}", value))
            elif name == "$ref":
                target = self._shared[value.removeprefix("#/$defs/")]
                found.append((target["$comment"], target))
        yield from ((pointer, item) for pointer, item in found if isinstance(item, dict))


def _is_part(pointer: str, name: str | None) -> bool:
    """Return True for the pointer of a property, or of an item if `name` is None."""
    if name is None:
        return pointer == "/items" or pointer.startswith("/prefixItems/")
    return pointer == f"/properties/{_step(name)}"


def _short(pointer: str) -> str:
    """Return a JSON pointer for an error message; the middle of a long one is left out."""
    half = _MAX_POINTER // 2
    return ascii(pointer if len(pointer) <= _MAX_POINTER else f"{pointer[:half]}...{pointer[-half:]}")[1:-1]


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _regex_message(text: str) -> tuple[str, str]:
    """Return a message, and the character of a regular expression that it is about; empty without one."""
    if (found := _REGEX.search(text)) is not None and "\n" not in found[1]:
        before = found[1][: len(found[2])].replace("\\/", "/")
        return _message(found[3]), f"character {len(before) + 1}"
    return _message(text), ""


def _line(position: re.Match[str] | None) -> str:
    return f"line {position[1]}, column {position[2]}" if position is not None else ""


def _message(error: str) -> str:
    """Return an error of llguidance in one line, in the words of this project where they are known."""
    position = _POSITION.fullmatch(error)
    text = _SOURCE.split(position[3] if position is not None else error)[0].partition("\n<")[0]
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    for pattern, known in _MESSAGES:
        if (found := re.fullmatch(pattern, text)) is not None:
            text = found.expand(known)
            break
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 1]}…"
