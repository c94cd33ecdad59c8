"""The form of an API: how its request bodies are read, and how its responses are written."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from baton.core.errors import Failure
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.input.client_call import ClientCall, Endpoint
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.translations.translated_body import TranslatedBody
from baton.gateway.request.output_builder import ChoiceSink
from baton.gateway.text.tokenizer import Tokenizer
from baton.runtime.process.byte_budget import ByteBudget


class CollectedResponse(ChoiceSink, Protocol):
    """Collects a call's choices for one JSON object. Use as `with`: leaving releases its memory."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def finish(self, outcome: CallOutcome) -> int:
        """Add what is known at the end, and return the length of the JSON object in bytes."""
        ...

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON object in pieces."""
        ...


class StreamedResponse(ChoiceSink, Protocol):
    """Adds a call's choices to a queue as events. Use as `with`: leaving releases its memory."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def finish(self, outcome: CallOutcome) -> None:
        """Add the last events of a response that succeeded."""
        ...

    def fail(self, failure: Failure) -> None:
        """Add the last event of a response that failed after its first event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseServices:
    """Services that the responses of all calls share."""

    tokenizer: Tokenizer
    budget: ByteBudget


Translate: TypeAlias = Callable[[Mapping[str, Any], UnknownFields], TranslatedBody]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiForm:
    """Form of one API.

    translate: turns a request body into a chat.
    collect: creates a response that is not streamed, from a call and the fields that it repeats.
    stream: creates a streamed response in the same way.
    """

    endpoint: Endpoint
    translate: Translate
    collect: Callable[[ClientCall, bytes, ResponseServices], CollectedResponse]
    stream: Callable[[ClientCall, bytes, ResponseServices, EventQueue], StreamedResponse]
