"""The APIs of chats and completions: how each reads bodies and writes responses."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from baton.gateway.http.messages.message_output import MessageEvents, MessageObject
from baton.gateway.http.non_streaming import NonStreamingResponse
from baton.gateway.http.output.api_form import ApiForm, ResponseServices
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.responses.response_events import ResponseEvents
from baton.gateway.http.responses.response_output import ResponseObject
from baton.gateway.http.sse_stream import EventStream
from baton.gateway.input.client_call import ClientCall, Endpoint
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.translations.messages_body import translate_messages
from baton.gateway.input.translations.responses_body import translate_responses
from baton.gateway.input.translations.translated_body import TranslatedBody


def _as_it_is(body: Mapping[str, Any], unknown: UnknownFields) -> TranslatedBody:
    return TranslatedBody(chat=body)


def _collect(call: ClientCall, echo: bytes, services: ResponseServices) -> NonStreamingResponse:
    return NonStreamingResponse(call, services.tokenizer, services.budget)


def _stream(call: ClientCall, echo: bytes, services: ResponseServices, queue: EventQueue) -> EventStream:
    return EventStream(call, services.tokenizer, queue)


_openai_form = partial(ApiForm, translate=_as_it_is, collect=_collect, stream=_stream)

COMPLETIONS_FORM = _openai_form(endpoint=Endpoint.COMPLETIONS)
CHAT_FORM = _openai_form(endpoint=Endpoint.CHAT)
RESPONSES_FORM = ApiForm(
    endpoint=Endpoint.RESPONSES, translate=translate_responses, collect=ResponseObject, stream=ResponseEvents
)
MESSAGES_FORM = ApiForm(
    endpoint=Endpoint.MESSAGES, translate=translate_messages, collect=MessageObject, stream=MessageEvents
)
