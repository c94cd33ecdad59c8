"""Builds the events of a streamed response of `/v1/responses`.

An item's last events repeat its text, and the last event of the stream repeats all items. The stream
therefore holds its output, like a response that is not streamed, and these events share it.
"""

from collections.abc import Sequence

from baton.core.client_api import ChoiceDelta
from baton.core.errors import Code, Failure
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.output.api_form import ResponseServices
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.output.json_list import JsonList
from baton.gateway.http.responses.response_items import ItemStatus, OutputItem, Part
from baton.gateway.http.responses.response_output import NO_PROBLEM, ResponseOutput
from baton.gateway.input.client_call import ClientCall


class ResponseEvents(ResponseOutput):
    """Implements `StreamedResponse`."""

    def __init__(self, call: ClientCall, echo: bytes, services: ResponseServices, queue: EventQueue) -> None:
        """Reserve memory. Raises OverBudget if there is too little. `queue` gets the events."""
        super().__init__(call, echo, services)
        self._queue = queue
        self._num_events = 0

    def put(self, choice: ChoiceDelta) -> None:
        """Add events for new output. Raises Refused (slow_reader) if too many bytes are unread."""
        self._begin_stream()
        super().put(choice)

    async def finish(self, outcome: CallOutcome) -> None:
        """Add the last event of a response that succeeded."""
        self._begin_stream()
        status, response = self._ended_object(outcome.usage)
        self._share(b"response." + status, [b'"response": ', *response])

    def fail(self, failure: Failure) -> None:
        """Add the last events of a response that failed after its first event."""
        self._end_item(ItemStatus.INCOMPLETE)
        code = "rate_limit_exceeded" if failure.code is Code.RESOURCE_EXHAUSTED else "server_error"
        problem = {**NO_PROBLEM, "error": {"code": code, "message": failure.message}}
        self._share(b"response.failed", [b'"response": ', *self._object(b"failed", problem, None)])

    def _begin_stream(self) -> None:
        """Add the first two events, before any other."""
        if not self._num_events:
            for name in (b"response.created", b"response.in_progress"):
                self._share(name, [b'"response": ', *self._object(b"in_progress", NO_PROBLEM, None)])

    def _item_began(self, item: OutputItem) -> None:
        for name, fields in item.began():
            self._put(name, b"".join(fields))

    def _item_grew(self, item: OutputItem, new: bytes, logprobs: JsonList) -> None:
        self._put(*item.delta(new, logprobs))

    def _item_ended(self, item: OutputItem) -> None:
        for name, fields in item.ended():
            self._share(name, fields)

    def _put(self, name: bytes, fields: bytes) -> None:
        """Add an event with new output."""
        self._queue.put(self._event_head(name) + fields + b"}\n\n")

    def _share(self, name: bytes, fields: Sequence[Part]) -> None:
        """Add an event that repeats output which is held anyway."""
        self._queue.put_uncounted(self._event_head(name), *fields, b"}\n\n")

    def _event_head(self, name: bytes) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b'event: %s\ndata: {"type": "%s", "sequence_number": %d, ' % (name, name, number)
