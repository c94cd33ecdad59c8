"""Holds the chat templates of a model, compiles those of requests, and finds the one that a chat needs."""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError, invalid
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.chat_template import ChatTemplate, read_json

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIR = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names with a meaning: the template of a chat without tools, and with tools."""
MAX_REQUEST_CHARACTERS = 8 * 2**20
"""Largest output of a request's own template."""
PROBE_S = 0.05
"""Processor time of one of the renderings that show a template's style."""
MAX_CACHED = 16
"""Number of requests' own templates that stay compiled."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplates:
    """Chat templates by name. A model may have none; a request may bring its own."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile the templates. Raises ModelError if the syntax of one is invalid.

        response_template: the model's description of its answers, for the parser.
        """
        self.response_template = response_template
        self._special_tokens = special_tokens
        self._named = {
            name: ChatTemplate(source, special_tokens).find_style(time.thread_time, PROBE_S)
            for name, source in sources.items()
        }
        self._own: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplates":
        """Load the templates of a model's directory.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` have precedence over
        `tokenizer_config.json`, as in transformers. Raises ModelError if a file or a template is invalid.
        """
        config = read_json(model_dir / CONFIG_FILE)
        sources = _named_sources(config.get("chat_template"))
        if (file := model_dir / TEMPLATE_FILE).is_file():
            sources = {DEFAULT: file.read_text("utf-8")}
            for more in sorted((model_dir / TEMPLATE_DIR).glob("*.jinja")):
                sources[more.stem] = more.read_text("utf-8")
        tokens = {name: _token_text(config[name]) for name in _TOKEN_NAMES if config.get(name) is not None}
        response_template = config.get("response_template")
        return cls(sources, tokens, response_template if isinstance(response_template, dict) else None)

    def __contains__(self, name: str) -> bool:
        """True if the model has a template of this name."""
        return name in self._named

    def chosen(self, *, has_tools: bool) -> ChatTemplate | None:
        """Return the model's template for chats with or without tools; None if it has none."""
        tool_use = self._named.get(TOOL_USE) if has_tools else None
        return tool_use or self._named.get(DEFAULT)

    def of(self, prompt: ChatPrompt) -> ChatTemplate:
        """Return the template of a chat, which is compiled if the request brings a new one.

        Raises Refused (400) if there is none, or if the request's own one is invalid.
        """
        if prompt.template is not None:
            return self._named.get(prompt.template) or self._own_template(prompt.template)
        template = self.chosen(has_tools=prompt.tools is not None)
        if template is None and self._named:
            raise invalid(
                f"this model has no default chat template; set chat_template to one of {', '.join(self._named)}"
            )
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions with a prompt in the model's format")
        return template

    def is_compiled(self, prompt: ChatPrompt) -> bool:
        """True if no template must be compiled for this chat."""
        return prompt.template is None or prompt.template in self._named or prompt.template in self._own

    def _own_template(self, source: str) -> ChatTemplate:
        with self._lock:
            if (known := self._own.get(source)) is not None:
                self._own.move_to_end(source)
                return known
        try:
            template = ChatTemplate(source, self._special_tokens, max_characters=MAX_REQUEST_CHARACTERS)
        except ModelError as error:
            raise invalid(f"chat_template is invalid: {error.__cause__}") from error
        template.find_style(time.thread_time, PROBE_S)
        with self._lock:
            self._own[source] = template
            if len(self._own) > MAX_CACHED:
                self._own.popitem(last=False)
        return template


def _named_sources(value: Any) -> dict[str, str]:
    """Return the templates of `tokenizer_config.json`, which has one template, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = value if isinstance(value, list) else []
    named = {each.get("name"): each.get("template") for each in entries if isinstance(each, dict)}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with its `content`."""
    return token["content"] if isinstance(token, dict) else str(token)
