"""Renders a model's chat template in a sandbox. Templates come from the model's directory, never from a
request.

The sandbox bounds the size of the output and the rendering time. Both are checked at every lookup, call and
operation of the template.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import LoopControlExtension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import BatonError, ModelError, Refused, invalid
from baton.core.request_limits import printable

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
MAX_RENDERED_CHARACTERS = 64 * 2**20
MAX_RENDER_S = 0.5
MAX_RANGE_TOTAL = 100_000
"""Maximum number of items that all `range` calls of one rendering may produce together."""

Clock = Callable[[], float]
"""Returns the time in seconds."""

Message = Mapping[str, str]


class TemplateTooExpensive(BatonError):
    """A chat template exceeded its limit of time or output."""


class TemplateTooSlow(TemplateTooExpensive):
    """A chat template exceeded its limit of time."""


class ChatTemplate:
    """A compiled chat template, which turns messages into a prompt. Not safe for concurrent use by
    threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, max_characters: int = MAX_RENDERED_CHARACTERS
    ) -> None:
        """Compile a template. Raises ModelError if its syntax is invalid.

        special_tokens: values of variables such as `bos_token`.
        max_characters: limit of the output.
        """
        self._environment = _Environment(max_characters)
        self._special_tokens = special_tokens
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is invalid: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """Load the template from `chat_template.jinja`, or else from `tokenizer_config.json`.

        Returns None if the model has no chat template. Raises ModelError if a file or the template is
        invalid.
        """
        config = read_json(model_dir / CONFIG_FILE)
        file = model_dir / TEMPLATE_FILE
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # named templates; those other than "default" are for tools and retrieval
            source = next(
                (t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None
            )
        if not isinstance(source, str):
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        return cls(source, {name: _token_text(config[name]) for name in names if config.get(name) is not None})

    def render(self, messages: Sequence[Message], clock: Clock, *, add_generation_prompt: bool = True) -> str:
        """Return the prompt for these messages.

        Raises Refused (400) if the template rejects the messages or exceeds its limits.
        """
        try:
            return self._render(messages, clock, MAX_RENDER_S, add_generation_prompt)
        except TemplateTooExpensive as error:
            raise _too_expensive(error) from error

    def render_within(self, messages: Sequence[Message], clock: Clock, max_s: float) -> str | None:
        """Return the prompt, or None if it takes more than `max_s` seconds. Raises Refused like `render`."""
        try:
            return self._render(messages, clock, max_s, add_generation_prompt=True)
        except TemplateTooSlow:
            return None
        except TemplateTooExpensive as error:
            raise _too_expensive(error) from error

    def _render(self, messages: Sequence[Message], clock: Clock, max_s: float, add_generation_prompt: bool) -> str:
        self._environment.begin(clock, max_s)
        values = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        texts: list[str] = []
        num_characters = 0
        try:
            for text in self._template.generate(**values, **self._special_tokens):
                texts.append(text)
                num_characters += len(text)
                self._environment.check_limits(num_characters)
        except TemplateTooExpensive:
            raise
        except Exception as error:  # a template is a program and can raise any error
            raise invalid(
                f"the model's chat template does not accept these messages: {printable(str(error))}"
            ) from error
        return "".join(texts)


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


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja environment with the settings of transformers, and limits checked at every lookup, call and
    operation."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, max_characters: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
        self._max_characters = max_characters
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["range"] = self._range
        self._rendering = _Rendering()

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
        self.check_limits()
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


def read_json(file: Path) -> dict[str, Any]:
    """Read an optional JSON file of the model's directory; empty if the file does not exist.

    Raises ModelError if it is not a readable JSON object.
    """
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must be a JSON object")
    return value


def _too_expensive(error: TemplateTooExpensive) -> Refused:
    return invalid(f"{error} for these messages; send fewer or shorter ones")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound for the characters, items or bits of an operation's result, before computing
    it."""
    sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "**":
        return numbers[0].bit_length() * numbers[1] if len(numbers) == 2 else 0
    if len(numbers) == 2:
        return sum(number.bit_length() for number in numbers)
    return next((size for size in sizes if size is not None), 0) * (numbers[0] if numbers else 0)


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with its `content`."""
    return token["content"] if isinstance(token, dict) else str(token)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Format JSON without the HTML escapes of jinja2's own filter, because models were trained without
    them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
