"""Compiles regular expressions for a search that takes linear time.

A pattern becomes a program for a set of threads, which advance together one character at a time (Pike, 1987;
Cox, 2010). See `pattern_scan`.
"""

import importlib
import re
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import ModelError
from baton.gateway.output.special_text import SpecialText

MAX_INSTRUCTIONS = 2000
"""Largest program. It bounds the cost of one character."""

_parser: Any = importlib.import_module("re._parser")  # the standard library's parser has no public name

_CATEGORIES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_PLACES = {"AT_BEGINNING": "begin", "AT_BEGINNING_STRING": "begin", "AT_END": "end", "AT_END_STRING": "end"}
_FLAGS = re.DOTALL | re.UNICODE


Target = tuple[int, tuple[int, ...]]
"""An instruction that consumes, matches or waits for the end of the text, and boundaries noted on the way."""
_MAX_KNOWN_CHARS = 1024


@dataclass(slots=True)
class Instruction:
    """One step of a program. Without any of these it is the match.

    char: consumes this character.
    char_class: consumes a character that this regular expression matches.
    at: an assertion, `begin` or `end` of the text.
    save: notes the position as this boundary of a named group: 2 g is the beginning of group g, 2 g + 1 its
        end.
    next: instructions to go on with, in the order of their priority.
    after: where a thread is when this instruction has consumed a character.
    consumed: result of the test of `char_class` for characters so far; bounded.
    """

    char: str = ""
    char_class: re.Pattern[str] | None = None
    at: str = ""
    save: int = -1
    next: tuple[int, ...] = ()
    after: tuple[Target, ...] = ()
    consumed: dict[str, bool] = field(default_factory=dict)

    @property
    def is_match(self) -> bool:
        """True at the end of the program."""
        return not self.next


class Pattern:
    """A compiled pattern, in which `.` matches any character and `$` only the end of the text.

    Literal text that spells a known special token matches only the token. A class of characters matches a
    token if it matches all characters of its text.
    """

    def __init__(self, source: str, special: SpecialText) -> None:
        """Compile a pattern. Raises ModelError if it is invalid or has constructs that are not supported."""
        try:
            tree = _parser.parse(source, re.DOTALL)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"the response template has the invalid pattern {source!r}: {error}") from error
        self.source = source
        self._groups: dict[int, int] = {group: i for i, group in enumerate(tree.state.groupdict.values())}
        self.group_names = tuple(tree.state.groupdict)
        self._special = special
        self.program: list[Instruction] = []
        if tree.state.flags & ~_FLAGS:
            raise self._unsupported("flags")
        self.start = self._sequence(list(tree), self._add(Instruction()))
        self.targets = {place: self._targets(self.start, at_begin=place) for place in (False, True)}
        for instruction in self.program:
            if instruction.char or instruction.char_class is not None:
                instruction.after = self._targets(instruction.next[0])
        firsts = [self.program[index] for index, _ in (*self.targets[False], *self.targets[True])]
        sources = {re.escape(instruction.char) for instruction in firsts if instruction.char}
        sources |= {instruction.char_class.pattern for instruction in firsts if instruction.char_class is not None}
        if any(instruction.char_class for instruction in firsts):
            sources.add("[\ud800-\udfff]")
        self.first = re.compile("|".join(sorted(sources)) or "(?!)", re.DOTALL)
        self.has_empty_match = any(self.program[i].is_match or self.program[i].at for i, _ in self.targets[True])
        self.is_empty_inside = any(self.program[index].is_match for index, _ in self.targets[False])

    def _targets(self, start: int, *, at_begin: bool = False, at_end: bool = False) -> tuple[Target, ...]:
        """Return what is reached from an instruction without a character, in the order of priority."""
        found: list[Target] = []
        seen: set[int] = set()
        waiting: list[Target] = [(start, ())]
        while waiting:
            index, saves = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            instruction = self.program[index]
            if instruction.at == "begin" and not at_begin:
                continue
            waits = instruction.at == "end" and not at_end
            if waits or instruction.char or instruction.char_class is not None or instruction.is_match:
                found.append((index, saves))
                continue
            if instruction.save >= 0:
                saves = (*saves, instruction.save)
            waiting.extend((following, saves) for following in reversed(instruction.next))
        return tuple(found)

    def at_end(self, index: int) -> tuple[Target, ...]:
        """Return what is reached from an instruction at the end of the text."""
        return self._targets(index, at_end=True)

    def consumes(self, instruction: Instruction, char: str) -> bool:
        """Return True if an instruction consumes a character."""
        if instruction.char_class is None:
            return instruction.char == char
        known = instruction.consumed.get(char)
        if known is None:
            text = self._special.decode(char) if "\ud800" <= char <= "\udfff" else char
            known = all(map(instruction.char_class.match, text))
            if len(instruction.consumed) < _MAX_KNOWN_CHARS:
                instruction.consumed[char] = known
        return known

    def _unsupported(self, what: str) -> ModelError:
        return ModelError(
            f"the response template's pattern {self.source!r} has a construct that is not supported ({what}); "
            "choose formats with --tool-parser and --reasoning-parser"
        )

    def _add(self, instruction: Instruction) -> int:
        if len(self.program) >= MAX_INSTRUCTIONS:
            raise self._unsupported("too many repetitions")
        self.program.append(instruction)
        return len(self.program) - 1

    def _sequence(self, nodes: list[tuple[Any, Any]], following: int) -> int:
        """Compile nodes that follow each other, from the last one on. Return where the program begins."""
        index = len(nodes)
        while index:
            index -= 1
            name, argument = str(nodes[index][0]), nodes[index][1]
            if name not in ("LITERAL", "BRANCH"):
                following = self._node(name, argument, following)
                continue
            end = index + (name == "LITERAL")
            while index and str(nodes[index - 1][0]) == "LITERAL":
                index -= 1
            literals = nodes[index:end]
            if name == "BRANCH":  # the parser moves a common beginning of the branches in front of them
                branches = [self._sequence([*literals, *branch], following) for branch in argument[1]]
                following = self._add(Instruction(next=tuple(branches)))
                continue
            for char in reversed(self._special.delimiter("".join(chr(code) for _, code in literals))):
                following = self._add(Instruction(char=char, next=(following,)))
        return following

    def _node(self, name: str, argument: Any, following: int) -> int:
        if name == "SUBPATTERN":
            group, add_flags, del_flags, nodes = argument
            if add_flags or del_flags:
                raise self._unsupported("flags")
            if group not in self._groups:
                return self._sequence(list(nodes), following)
            save = 2 * self._groups[group]
            end = self._add(Instruction(save=save + 1, next=(following,)))
            return self._add(Instruction(save=save, next=(self._sequence(list(nodes), end),)))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, nodes = argument
            return self._repeat(least, most, list(nodes), following, lazy=name == "MIN_REPEAT")
        if name == "AT" and str(argument) in _PLACES:
            return self._add(Instruction(at=_PLACES[str(argument)], next=(following,)))
        if name in ("ANY", "NOT_LITERAL", "IN"):
            char_class = re.compile(self._class_source(name, argument), re.DOTALL)
            return self._add(Instruction(char_class=char_class, next=(following,)))
        raise self._unsupported(name)

    def _repeat(self, least: int, most: Any, nodes: list[tuple[Any, Any]], following: int, *, lazy: bool) -> int:
        def choice(body: int, end: int) -> tuple[int, ...]:
            return (end, body) if lazy else (body, end)

        end = following
        if str(most) == "MAXREPEAT":
            loop = self._add(Instruction(next=(following,)))
            self.program[loop].next = choice(self._sequence(nodes, loop), following)
            following = loop
        else:
            for _ in range(int(most) - least):
                body = self._sequence(nodes, following)
                following = self._add(Instruction(next=choice(body, end)))
        for _ in range(least):
            following = self._sequence(nodes, following)
        return following

    def _class_source(self, name: str, argument: Any) -> str:
        """Return a regular expression for one character."""
        if name == "ANY":
            return "."
        if name == "NOT_LITERAL":
            return f"[^{re.escape(chr(argument))}]"
        parts = []
        for kind, value in argument:
            match str(kind):
                case "LITERAL":
                    parts.append(re.escape(chr(value)))
                case "RANGE":
                    parts.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
                case "NEGATE":
                    parts.insert(0, "^")
                case _:
                    category = str(value).removeprefix("CATEGORY_")
                    if category not in _CATEGORIES:
                        raise self._unsupported(category)
                    parts.append(_CATEGORIES[category])
        return "[" + "".join(parts) + "]"
