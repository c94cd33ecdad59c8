"""Makes the grammar of a request's answers from its constraint, its tools and the model's format."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import Reason
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.gateway.constraints.gbnf import GrammarTextError
from baton.gateway.constraints.lark_writer import WrittenGrammar
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


NO_GRAMMAR = WrittenGrammar()


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar of the answers to a request, which is empty if they need none.

    field: the field that asks for it, for errors.
    """

    written: WrittenGrammar
    field: str = ""


class GrammarCheck(Protocol):
    """Checks that grammars can be compiled within limits."""

    async def check(self, grammar: AnswerGrammar, tenant: str) -> None:
        """Raise InvalidField, which says where, if the grammar is invalid or too expensive.

        Raises Refused if it cannot be checked at present. Tenants do not delay each other.
        """
        ...


async def answer_grammar(
    constraint: AnswerConstraint | None,
    chat: ChatRequest | None,
    prompt: str | None,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
) -> AnswerGrammar:
    """Return the grammar of the answers.

    prompt: the prompt of a chat as text; None for a completion.

    If a call is required, `response_format` has no effect, because the answer has no text. Raises
    InvalidField if the grammar cannot be written, or if it is too large.
    """
    is_required = chat is not None and chat.tools.mode is ToolMode.REQUIRED
    if constraint is None or (is_required and _is_of_text(constraint)):
        if chat is None or prompt is None:
            return AnswerGrammar(NO_GRAMMAR)
        return AnswerGrammar(await tool_grammar(chat, prompt, output_format, tokenizer) or NO_GRAMMAR, "tools")
    if is_required:
        message = f"{constraint.field} constrains the text, but tool_choice asks for a call; send only one of them"
        raise InvalidField(constraint.field, message)
    num_characters = constraint.num_characters + (len(chat.tools.tools) * INLINE_CHARACTERS if chat else 0)
    if num_characters <= INLINE_CHARACTERS:
        written = _written(constraint, chat, prompt, output_format, tokenizer)
    else:
        written = await asyncio.to_thread(_written, constraint, chat, prompt, output_format, tokenizer)
    return AnswerGrammar(written, constraint.field)


def _is_of_text(constraint: AnswerConstraint) -> bool:
    """True if a constraint has no effect on an answer without text."""
    return constraint.field.startswith("response_format")


def _written(
    constraint: AnswerConstraint,
    chat: ChatRequest | None,
    prompt: str | None,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
) -> WrittenGrammar:
    token_ids = {token.text: id_ for id_, token in tokenizer.added_tokens.items()}
    rule, field = constraint.rule, constraint.field
    try:
        if chat is None or prompt is None or chat.tools.mode is ToolMode.NONE or output_format.tools is None:
            grammar = content_grammar(output_format, token_ids, prompt, rule)
        else:
            writer = MessageGrammar(output_format, output_format.tools, token_ids, prompt)
            tools = callable_tools(chat, has_free_arguments=False)
            mixed = writer.content(rule, tools, parallel=chat.tools.parallel)
            if mixed is None:
                remedy = "set tool_choice to none or required" if _is_of_text(constraint) else "set tool_choice to none"
                message = (
                    f"{field} cannot be combined with tools, because this model's calls begin with no special token, "
                    f"so that only a JSON schema can be told from them; {remedy}"
                )
                raise InvalidField(field, message, Reason.UNSUPPORTED_FIELD)
            grammar = mixed
    except GrammarTextError as error:
        raise InvalidField(field, f"{field}: {error}", Reason.INVALID_GRAMMAR) from error
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        message = f"{field} makes a grammar of {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed; send less"
        raise InvalidField(field, message, Reason.INVALID_GRAMMAR)
    return grammar
