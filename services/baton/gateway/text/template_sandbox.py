"""Jinja environment for chat templates: the functions and settings of transformers, and limits.

The size of the output and the processor time are bounded. Both are checked at every lookup, call and
operation of a template.
"""

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.core.errors import BatonError

MAX_RENDERED_CHARACTERS = 64 * 2**20
MAX_RANGE_TOTAL = 100_000
"""Maximum number of items that all `range` calls of one rendering may produce together."""
MAX_INDENT = 64
"""Largest indentation of JSON."""
MAX_FORMAT_CHARACTERS = 4096
"""Longest text with format fields."""
_NUMBER = re.compile(r"\d+")
_WIDTH_OF_VALUE = re.compile(r"\*|\{[^{}]*\{")
"""Matches a format field that takes its width from a value."""

Clock = Callable[[], float]
"""Returns the processor time of the thread in seconds."""


class TemplateTooExpensive(BatonError):
    """A chat template exceeded its limit of time or output."""


class TemplateTooSlow(TemplateTooExpensive):
    """A chat template exceeded its limit of time."""


class _Rendering(threading.local):
    """Limits of the rendering that runs in a thread. Several threads may render at the same time."""

    clock: Clock = float
    max_s = deadline_s = 0.0
    range_left = 0

    def begin(self, clock: Clock, max_s: float) -> None:
        """Reset the limits."""
        self.clock = clock
        self.max_s = max_s
        self.deadline_s = clock() + max_s
        self.range_left = MAX_RANGE_TOTAL


class GenerationBlocks(Extension):
    """The tag `generation`, with which transformers marks the parts of an answer for training.

    Its body is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block. As in transformers, its body has a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class TemplateNamespace(Namespace):
    """Jinja's `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class TemplateDict:
    """The function `dict` of templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dict with these keys."""
        return dict.fromkeys(*args)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Environment that equals the one of transformers, apart from its limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_characters: int = MAX_RENDERED_CHARACTERS, now: Callable[[], datetime] = datetime.now):
        # Not optimized: constant expressions would be evaluated while a template is compiled, without limits.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationBlocks, LoopControlExtension],
        )
        self._max_characters = max_characters
        self._rendering = _Rendering()
        self.filters["tojson"] = _to_json
        for name in ("center", "indent", "wordwrap", "format", "replace", "join", "batch", "slice"):
            self.filters[name] = self._limited(name, self.filters[name])
        self.globals["raise_exception"] = _refuse
        self.globals["range"] = self._range
        self.globals["strftime_now"] = lambda format: now().strftime(format)  # noqa: A006 - the name of transformers
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]

    def begin(self, clock: Clock, max_s: float) -> None:
        """Reset the limits for a new rendering in this thread."""
        self._rendering.begin(clock, max_s)

    def check_limits(self, num_characters: int = 0) -> None:
        """Raise TemplateTooExpensive if the time is up or `num_characters` is above the limit."""
        if num_characters > self._max_characters:
            raise TemplateTooExpensive(f"the chat template produces more than {self._max_characters} characters")
        if self._rendering.clock() > self._rendering.deadline_s:
            raise TemplateTooSlow(f"the chat template runs longer than {self._rendering.max_s:g} s")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_limits()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_limits()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        size = _method_size(owner, obj.__name__, (*args, *kwargs.values())) if isinstance(owner, str) else 0
        self.check_limits(size)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check_limits(_result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._rendering.range_left -= len(numbers)
        if self._rendering.range_left < 0:
            raise TemplateTooExpensive(f"the chat template loops over more than {MAX_RANGE_TOTAL} numbers")
        return numbers

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            self.check_limits(_format_size(value.__self__, (*args, *kwargs.values())))
            return wrapped(*args, **kwargs)

        return limited

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that checks the size of its result first."""
        num_leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment comes first

        def limited(*args: Any, **kwargs: Any) -> Any:
            value, *rest = args[num_leading:]
            value = value if hasattr(value, "__len__") else list(value) if hasattr(value, "__iter__") else value
            self.check_limits(_filter_size(name, value, (*rest, *kwargs.values())))
            return function(*args[:num_leading], value, *rest, **kwargs)

        limited.__dict__.update(function.__dict__)  # says which of the two comes first
        return limited


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template cannot hold {name!r}")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound for the characters, items or bits of an operation's result, before computing
    it."""
    if operator == "%":
        if not isinstance(left, str):
            return 0
        return _format_size(left, _values_of(right))
    sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "**":
        return numbers[0].bit_length() * numbers[1] if len(numbers) == 2 else 0
    if len(numbers) == 2:
        return sum(number.bit_length() for number in numbers)
    return next((size for size in sizes if size is not None), 0) * (numbers[0] if numbers else 0)


def _method_size(text: str, name: str, args: Sequence[Any]) -> int:
    """Return an upper bound for the characters of the result of a string's method."""
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return len(text) + _largest_number(args)
        case "expandtabs":
            return len(text) + text.count("\t") * max(8, _largest_number(args))
        case "join":
            return _joined_size(text, list(args[0]) if args and hasattr(args[0], "__len__") else ())
        case "translate":
            tables = [value for value in args if isinstance(value, dict)]
            return len(text) * max((len(str(value)) for table in tables for value in table.values()), default=1)
    return _filter_size(name, text, args)


def _filter_size(name: str, value: Any, args: Sequence[Any]) -> int:
    """Return an upper bound for the characters or items of the result of a filter."""
    texts = [each for each in args if isinstance(each, str)]
    match name:
        case "replace":
            text = str(value)
            old, new = (*texts, "", "")[:2]
            return len(text) + (text.count(old) if old else len(text) + 1) * len(new)
        case "join":
            return _joined_size(max(texts, key=len, default=""), value if hasattr(value, "__len__") else ())
        case "center" | "batch" | "slice":
            return (len(value) if hasattr(value, "__len__") else 0) + _largest_number(args)
        case "indent":
            return len(str(value)) + (str(value).count("\n") + 1) * max([_largest_number(args), *map(len, texts)])
        case "wordwrap":
            return len(str(value)) * (1 + max(map(len, texts), default=1))
        case "format":
            return _format_size(str(value), args)
    return 0


def _joined_size(separator: str, items: Collection[Any]) -> int:
    return len(separator) * len(items) + sum(len(item) for item in items if isinstance(item, str))


def _format_size(text: str, values: Sequence[Any]) -> int:
    """Return an upper bound for a formatted text. A width is written in it, or is one of the values."""
    if len(text) > MAX_FORMAT_CHARACTERS:
        return MAX_RENDERED_CHARACTERS + 1
    widths = [int(digits[:10]) for digits in _NUMBER.findall(text)]
    if _WIDTH_OF_VALUE.search(text):
        widths.append(_largest_number(values))
    longest = max((len(value) for value in values if isinstance(value, str)), default=64)
    return len(text) + (text.count("%") + text.count("{")) * (max(widths, default=0) + longest)


def _values_of(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, tuple) else (value,)


def _largest_number(args: Sequence[Any]) -> int:
    return max((value for value in args if isinstance(value, int)), default=0)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format JSON without the HTML escapes of jinja2's own filter, because models were trained without
    them."""
    if indent is not None and indent > MAX_INDENT:
        raise TemplateTooExpensive(f"the chat template indents by more than {MAX_INDENT}")
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
