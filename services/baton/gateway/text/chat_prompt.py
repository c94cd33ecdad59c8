"""Input of a chat template: the messages of a chat, the tools, and the other variables of the template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""Message of a chat in OpenAI's form, but arguments of tool calls are objects where they are valid JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Chat from which a template makes a prompt.

    tools: tools in OpenAI's form; None if there are none.
    documents: documents for retrieval; None if there are none.
    variables: further variables of the template, such as `enable_thinking`.
    add_generation_prompt: end with the beginning of an answer.
    continue_final_message: leave the last message open, so that the model continues it.
    template: name of one of the model's templates, or a template; None chooses the model's.
    num_characters: size of everything that the template can see, for the choice of where it runs.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    num_characters: int = 0
