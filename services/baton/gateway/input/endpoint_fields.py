"""The table of request fields of each endpoint."""

from collections.abc import Mapping

from baton.gateway.input.field_policy import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from baton.gateway.input.field_table import FieldTable
from baton.gateway.input.messages_fields import COUNT_TOKENS, MESSAGES
from baton.gateway.input.responses_fields import RESPONSES

ENDPOINTS: Mapping[str, FieldTable] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
"""Table of each endpoint with a JSON body, by path."""
