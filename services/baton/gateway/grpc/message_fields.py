"""Reads the fields of a message that are sent as JSON, and names fields in errors as the client sent them."""

import re
from collections.abc import Mapping
from typing import Any

from baton.core.errors import Reason
from baton.core.request_limits import printable
from baton.gateway.input.client_call import InvalidField
from baton.gateway.input.field_policy import CHAT_ONLY
from baton.gateway.input.field_reader import check_text
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.translations.client_names import ClientNames, replace_name

FIELDS_JSON = "fields_json"
"""Field of a body over gRPC with further fields as JSON."""
_IMPLIED = frozenset(("stream", "return_token_ids", "stream_options"))
"""Fields that every call over gRPC has, or cannot have."""
_ADVICE: Mapping[str, str] = {
    "deadline_s": "set the deadline of the call",
    "echo": "the client has the prompt",
    "prompt_logprobs": "send the request over HTTP",
    "request_id": "the initial metadata x-request-id has the id",
    "return_token_strs": "Detokenize returns the text of token ids",
    "return_tokens_as_token_ids": "logprobs have token ids",
    "top_logprobs": "set logprobs in the message to this number",
}
"""Fields that no message can have, and what to do instead."""


class GrpcMessageFields(ClientNames):
    """The fields of one message and of its JSON.

    body: all of them, as in the body of an equivalent call over HTTP.
    size: characters of the JSON.
    """

    __slots__ = ("_further", "body", "size")

    def __init__(self, body: Mapping[str, Any], further: Mapping[str, Any], size: int) -> None:
        self._further = further
        self.body = body
        self.size = size

    def renamed(self, error: InvalidField) -> InvalidField:
        name = re.split(r"[.\[]", error.param, maxsplit=1)[0]
        if name not in self._further:
            return error
        failure, place = error.failure, f"{FIELDS_JSON}.{error.param}"
        if name in CHAT_ONLY and self.body.get("messages") is None:
            return InvalidField(place, f"{place} is for chats; set {FIELDS_JSON}.messages, too", failure.reason)
        message = replace_name(failure.message, error.param, place, is_word=error.param.isalpha())
        return InvalidField(place, message, failure.reason, failure.code)


async def read_message(body: Mapping[str, Any]) -> GrpcMessageFields:
    """Return the fields of a message, which `body` has without those of its JSON.

    Raises Refused if the JSON is invalid, repeats a field, or asks for something that no message can have.
    """
    text = body.get(FIELDS_JSON)
    if text is None:
        return GrpcMessageFields(body, {}, 0)
    check_text(FIELDS_JSON, text)
    further = await parse_body(text.encode(), FIELDS_JSON)
    for name, value in further.items():
        place = f"{FIELDS_JSON}.{printable(name)[1:-1]}"
        if name in body or name in _IMPLIED:
            what = "is implied by gRPC" if name in _IMPLIED else "is set in the message, too"
            raise InvalidField(place, f"{place} {what}; leave it out")
        if value is not None and value is not False and name in _ADVICE:
            raise InvalidField(place, f"{place} has no effect over gRPC: {_ADVICE[name]}", Reason.UNSUPPORTED_FIELD)
    if further.get("messages") is not None and body.get("prompt") is not None:
        place = f"{FIELDS_JSON}.messages"
        raise InvalidField(place, f"both {place} and a prompt are set; send only one of them")
    fields = {name: value for name, value in body.items() if name != FIELDS_JSON} | further
    return GrpcMessageFields(fields, further, len(text))
