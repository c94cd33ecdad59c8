"""Renders chats with the chat templates of a model, as transformers does, in a sandbox.

Templates come from the model's directory, and from requests if a setting allows it.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from baton.core.errors import ModelError, Refused, invalid
from baton.core.request_limits import printable
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.template_sandbox import (
    MAX_RENDERED_CHARACTERS,
    Clock,
    TemplateEnvironment,
    TemplateTooExpensive,
    TemplateTooSlow,
)
from baton.gateway.text.template_style import TemplateStyle, style_of

MAX_RENDER_S = 0.5
"""Maximum processor time of a rendering."""
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message, which the model continues. The tag of transformers."""


class ChatTemplate:
    """A compiled chat template, which turns messages into a prompt."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_characters: int = MAX_RENDERED_CHARACTERS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template. Raises ModelError if its syntax is invalid.

        special_tokens: values of variables such as `bos_token`.
        max_characters: limit of the output.
        now: the time for `strftime_now`.
        """
        self.source = source
        self._environment = TemplateEnvironment(max_characters, now)
        self._special_tokens = special_tokens
        try:
            self._template = self._environment.from_string(source)
            variables = meta.find_undeclared_variables(self._environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template is invalid: {error}") from error
        self.uses_tools = "tools" in variables
        """True if the template puts the tools into the prompt."""
        self.uses_documents = "documents" in variables
        """True if the template puts the documents into the prompt."""
        self.style = TemplateStyle()
        """Form in which the template expects messages; see `find_style`."""

    def find_style(self, clock: Clock, max_s: float) -> "ChatTemplate":
        """Find out in which form the template expects messages. Returns the template.

        `max_s` bounds the processor time of each of at most twelve renderings of small chats.
        """

        def render(prompt: ChatPrompt) -> str:
            try:
                return self._rendered(prompt, list(prompt.messages), clock, max_s)
            except TemplateTooExpensive as error:
                raise _too_expensive(error) from error

        self.style = style_of(self.source, render)
        return self

    def render(self, prompt: ChatPrompt, clock: Clock) -> str:
        """Return the prompt for a chat.

        Raises Refused (400) if the template rejects the messages or exceeds its limits.
        """
        try:
            return self._render(prompt, clock, MAX_RENDER_S)
        except TemplateTooExpensive as error:
            raise _too_expensive(error) from error

    def render_within(self, prompt: ChatPrompt, clock: Clock, max_s: float) -> str | None:
        """Return the prompt, or None if it takes more than `max_s` seconds. Raises Refused like `render`."""
        try:
            return self._render(prompt, clock, max_s)
        except TemplateTooSlow:
            return None
        except TemplateTooExpensive as error:
            raise _too_expensive(error) from error

    def _render(self, prompt: ChatPrompt, clock: Clock, max_s: float) -> str:
        if not prompt.continue_final_message:
            return self._rendered(prompt, self.style.adapted(prompt.messages), clock, max_s)
        content = prompt.messages[-1].get("content")
        if not content:
            raise invalid(
                "continue_final_message is true, but the last message has no content; send one that the model continues"
            )
        open_message = {**prompt.messages[-1], "content": content + _CONTINUE}
        messages = self.style.adapted([*prompt.messages[:-1], open_message])
        return _cut_at_tag(self._rendered(prompt, messages, clock, max_s), content)

    def _rendered(self, prompt: ChatPrompt, messages: list[Any], clock: Clock, max_s: float) -> str:
        self._environment.begin(clock, max_s)
        values = {
            **self._special_tokens,
            **prompt.variables,
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
            "tools": prompt.tools,
            "documents": prompt.documents,
        }
        texts: list[str] = []
        num_characters = 0
        try:
            for text in self._template.generate(values):
                texts.append(text)
                num_characters += len(text)
                self._environment.check_limits(num_characters)
        except TemplateTooExpensive:
            raise
        except Exception as error:  # a template is a program and can raise any error
            raise invalid(f"the chat template does not accept this chat: {printable(str(error))}") from error
        return "".join(texts)


def _cut_at_tag(text: str, content: str) -> str:
    """Return a prompt without what follows the last message.

    A template may remove the space at the end of a message, and so of the tag. Then the message is taken not
    to end with space either.
    """
    tag = _CONTINUE.strip()
    at = text.rfind(tag)
    if at < 0 or content.strip() not in text:
        raise invalid(
            "continue_final_message is true, but the chat template changes the last message; send the whole prompt to "
            "/v1/completions"
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


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
    return invalid(f"{error} for this chat; make the chat shorter")
