"""Makes the grammar of a request's answers from its constraint, its tools and the model's format."""

import asyncio
from typing import Protocol

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.message_grammar import MessageGrammar, content_grammar
from baton.gateway.input.answers.constraint_fields import AnswerConstraint
from baton.gateway.input.chat.chat_request import ChatRequest
from baton.gateway.input.chat.tool_fields import ToolMode
from baton.gateway.input.chat.tool_grammar import callable_tools, tool_grammar
from baton.gateway.input.client_call import InvalidField
from baton.gateway.output.formats import OutputFormat
from baton.gateway.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 4096
"""The grammar of a smaller constraint is written on the event loop, in less than 2 ms."""


class GrammarCheck(Protocol):
    """Checks that grammars can be compiled within limits."""

    async def check(self, grammar: str, field: str) -> None:
        """Raise InvalidField, which names `field`, if the grammar is invalid or too expensive."""
        ...


async def answer_grammar(
    constraint: AnswerConstraint | None,
    chat: ChatRequest | None,
    prompt: str | None,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
) -> tuple[str, str]:
    """Return the grammar of the answers, which is empty if they need none, and the field that asks for it.

    prompt: the prompt of a chat as text; None for a completion.

    Raises InvalidField if the grammar cannot be written, or if it is too large.
    """
    if constraint is None:
        if chat is None or prompt is None:
            return "", ""
        return await tool_grammar(chat, prompt, output_format, tokenizer), "tools"
    if chat is not None and chat.tools.mode is ToolMode.REQUIRED:
        message = f"{constraint.field} constrains the text, but tool_choice asks for a call; send only one of them"
        raise InvalidField(constraint.field, message)
    num_characters = constraint.num_characters + (len(chat.tools.tools) * INLINE_CHARACTERS if chat else 0)
    if num_characters <= INLINE_CHARACTERS:
        return _written(constraint, chat, prompt, output_format, tokenizer), constraint.field
    grammar = await asyncio.to_thread(_written, constraint, chat, prompt, output_format, tokenizer)
    return grammar, constraint.field


def _written(
    constraint: AnswerConstraint,
    chat: ChatRequest | None,
    prompt: str | None,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
) -> str:
    token_ids = {token.text: id_ for id_, token in tokenizer.added_tokens.items()}
    rule, field = constraint.rule, constraint.field
    try:
        if chat is None or prompt is None or chat.tools.mode is ToolMode.NONE or output_format.tools is None:
            grammar = content_grammar(output_format, token_ids, prompt, rule)
        else:
            writer = MessageGrammar(output_format, output_format.tools, token_ids, prompt)
            mixed = writer.content(rule, callable_tools(chat), parallel=chat.tools.parallel)
            if mixed is None:
                message = (
                    f"{field} cannot be combined with tools, because this model's calls begin with no special token; "
                    "set tool_choice to none or required"
                )
                raise InvalidField(field, message, Reason.UNSUPPORTED_FIELD)
            grammar = mixed
    except GrammarTextError as error:
        raise InvalidField(field, f"{field}: {error}", Reason.INVALID_GRAMMAR) from error
    if (size := len(grammar.encode())) > MAX_GRAMMAR_BYTES:
        message = f"{field} makes a grammar of {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed; send less"
        raise InvalidField(field, message, Reason.INVALID_GRAMMAR)
    return grammar
