"""Fields that `/v1/responses` and `/v1/messages` have in common with chats."""

from collections.abc import Mapping

from baton.gateway.input.field_policy import CHAT
from baton.gateway.input.field_table import FieldTable, ReadField, RefusedField

_CHATS_ONLY = "only /v1/chat/completions has it"
_OF_CHATS: Mapping[str, str] = {
    "prompt_logprobs": _CHATS_ONLY,
    "return_token_ids": _CHATS_ONLY,
    "return_tokens_as_token_ids": _CHATS_ONLY,
    "timeline": _CHATS_ONLY,
    "n": "a response is one answer; send several requests",
    "best_of": "a response is one answer; send several requests",
    "functions": "send tools",
    "function_call": "send tool_choice",
}
"""Fields of chats that no other API has, with what to do instead."""
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "parallel_tool_calls": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "timeline": (False,),
}
"""Values of refused fields that change nothing."""


def with_chat_fields(own: FieldTable, instead: Mapping[str, str]) -> FieldTable:
    """Return the table of an API whose requests become chats.

    It has the API's own fields, and each other field of a chat: with the same meaning, or refused.
    `instead` has the names of refused fields with what to do instead.
    """
    refused = {name: RefusedField(advice, _DEFAULTS.get(name, ())) for name, advice in {**_OF_CHATS, **instead}.items()}
    return {**CHAT, **refused, **own}


def passed_fields(table: FieldTable) -> tuple[str, ...]:
    """Return the names of fields that mean the same as in a chat, so they become part of it as they are."""
    return tuple(name for name, rule in table.items() if isinstance(rule, ReadField) and CHAT.get(name) is rule)
