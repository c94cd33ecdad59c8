"""A model's chat template, rendered in a sandbox. It comes from the model's directory only, never from a
request.

The sandbox bounds what a template can cost: characters it may make, and seconds it may take, looked at
whenever it looks at something.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import LoopControlExtension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.core.errors import BatonError, ModelError, invalid
from baton.core.request_limits import printable

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
MAX_RENDERED_CHARACTERS = 64 * 2**20
MAX_RENDER_S = 0.5
MAX_RANGE_TOTAL = 100_000
"""Numbers that all `range` calls of one rendering may give together."""

Message = Mapping[str, str]


class TemplateTooExpensive(BatonError):
    """A chat template ran longer or made more than it may."""


class ChatTemplate:
    """Turns messages into the prompt that the model was trained on. One thread at a time may render."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError when the template cannot be compiled."""
        self._environment = _Environment()
        self._special_tokens = special_tokens
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be used: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """From `chat_template.jinja`, or else from `tokenizer_config.json`; None when the model has none.
        Raises ModelError."""
        config = read_json(model_dir / CONFIG_FILE)
        file = model_dir / TEMPLATE_FILE
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates; the others are for tools and retrieval
            source = next(
                (t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None
            )
        if not isinstance(source, str):
            return None
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
        return cls(source, {name: _token_text(config[name]) for name in names if config.get(name) is not None})

    def render(
        self, messages: Sequence[Message], clock: Callable[[], float], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt. `clock` gives seconds. Raises Refused (400) when the template does not accept the
        messages or passes its limits."""
        self._environment.begin(clock)
        values = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in self._template.generate(**values, **self._special_tokens):
                pieces.append(piece)
                num_characters += len(piece)
                self._environment.spend(num_characters)
        except TemplateTooExpensive as error:
            raise invalid(f"{error} for these messages; send fewer or shorter ones") from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise invalid(
                f"the model's chat template does not accept these messages: {printable(str(error))}"
            ) from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """As transformers sets it up, with limits at every point where a template looks something up, calls or
    computes."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["range"] = self._range
        self._clock: Callable[[], float] = float
        self._deadline_s = 0.0
        self._range_left = 0

    def begin(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline_s = clock() + MAX_RENDER_S
        self._range_left = MAX_RANGE_TOTAL

    def spend(self, num_characters: int = 0) -> None:
        """Raises TemplateTooExpensive when the rendering is out of time or makes more than
        `MAX_RENDERED_CHARACTERS`."""
        if num_characters > MAX_RENDERED_CHARACTERS:
            raise TemplateTooExpensive(f"the chat template makes more than {MAX_RENDERED_CHARACTERS} characters")
        if self._clock() > self._deadline_s:
            raise TemplateTooExpensive(f"the chat template runs longer than {MAX_RENDER_S:g} s")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.spend()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.spend()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend(_size_of(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._range_left -= len(numbers)
        if self._range_left < 0:
            raise TemplateTooExpensive(f"the chat template counts further than {MAX_RANGE_TOTAL}")
        return numbers


def read_json(file: Path) -> dict[str, Any]:
    """An optional file of the model's directory; empty when it is not there. Raises ModelError when it is no
    JSON object."""
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must be a JSON object")
    return value


def _size_of(operator: str, left: Any, right: Any) -> int:
    """Characters, items or digits of the result, before it is made."""
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
    """Special tokens are strings or objects that describe one."""
    return token["content"] if isinstance(token, dict) else str(token)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Without the HTML escapes of jinja2's own filter, as models were trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
