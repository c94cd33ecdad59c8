"""Responses of `/v1/responses` and `/v1/messages`: joined events of a stream equal the whole object, for any
parts of a message, however they arrive."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.core.client_api import ChoiceDelta, MessagePart, PartKind, TotalUsage
from baton.core.errors import Code, Failure, Reason
from baton.core.request import FinishReason, TokenLogprobs
from baton.gateway.gateway_service import CallOutcome
from baton.gateway.http.messages.message_output import MessageEvents, MessageObject
from baton.gateway.http.output.api_form import ResponseServices
from baton.gateway.http.output.event_queue import EventQueue
from baton.gateway.http.responses.response_events import ResponseEvents
from baton.gateway.http.responses.response_output import ResponseObject
from baton.gateway.input.client_call import ClientCall, Endpoint
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.translations.json_echo import encode_echo
from baton.gateway.input.translations.responses_body import translate_responses
from baton.gateway.request.unread_output import UnreadStreams
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget
from tests.scale import sized
from tests.unit.gateway.validator_calls import call

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = TotalUsage(num_prompt_tokens=7, num_output_tokens=5, num_cached_tokens=4, num_reasoning_tokens=2)
OUTCOME = CallOutcome(usage=USAGE, timeline=())
ECHO = encode_echo(translate_responses({"input": "hi", "temperature": 0.5}, UnknownFields()).echo)
FAILURE = Failure(code=Code.UNAVAILABLE, reason=Reason.WORKER_LOST, message="the worker is lost")


@dataclass(frozen=True)
class Item:
    """One item that a model writes: reasoning, content, or a call with its arguments."""

    kind: PartKind
    text: str
    name: str = ""


TEXTS = st.text(min_size=1, max_size=12)
ITEMS = st.lists(
    st.builds(Item, st.sampled_from((PartKind.REASONING, PartKind.CONTENT)), TEXTS)
    | st.builds(
        lambda name, value: Item(PartKind.TOOL_CALL, json.dumps(value, ensure_ascii=False), name),
        TEXTS,
        st.dictionaries(TEXTS, TEXTS | st.integers(), max_size=2),
    ),
    max_size=5,
).map(lambda items: [each for at, each in enumerate(items) if is_new(items, at)])


def is_new(items: Sequence[Item], at: int) -> bool:
    return at == 0 or items[at].kind is PartKind.TOOL_CALL or items[at].kind is not items[at - 1].kind


def parts_of(items: Sequence[Item], size: int) -> Iterator[MessagePart]:
    """Yield the parts of items, with texts of at most `size` characters."""
    index = -1
    for item in items:
        kind = item.kind
        if kind is PartKind.TOOL_CALL:
            index += 1
            yield MessagePart(kind=kind, text=item.name, call_index=index, call_id=f"call_{index}")
            kind = PartKind.TOOL_ARGUMENTS
        for begin in range(0, len(item.text), size):
            yield MessagePart(kind=kind, text=item.text[begin : begin + size], call_index=max(0, index))


def deltas(items: Sequence[Item], size: int, group: int, finish: FinishReason) -> list[ChoiceDelta]:
    parts = list(parts_of(items, size))
    groups = [tuple(parts[at : at + group]) for at in range(0, len(parts), group)] or [()]
    return [
        ChoiceDelta(index=0, parts=each, finish=finish if at == len(groups) - 1 else None)
        for at, each in enumerate(groups)
    ]


def a_call(endpoint: Endpoint, **fields: Any) -> ClientCall:
    return call({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, **fields}, endpoint)


class Rig:
    """Memory and a queue for responses."""

    def __init__(self, num_bytes: int = 10**6) -> None:
        self.budget = ByteBudget({Account.REQUESTS: num_bytes, Account.UNSENT: 10**6})
        self.services = ResponseServices(tokenizer=ByteTokenizer(vocab_size=300), budget=self.budget)
        self.unread = UnreadStreams(self.budget, max_bytes=10**6, clock=lambda: 0.0).open(lambda failure: None)
        self.queue = EventQueue(self.unread)

    def events(self) -> list[Any]:
        """Return the events, each with the name of its line."""
        self.queue.end()
        text = asyncio.run(self._text()).decode()
        assert self.queue.num_bytes == 0
        *events, end = text.split("\n\n")
        assert end == ""
        parsed = []
        for event in events:
            name, data = event.split("\n")
            parsed.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {parsed[-1]['type']}"
        return parsed

    async def _text(self) -> bytes:
        pieces = []
        while piece := await self.queue.next_piece():
            pieces.append(piece)
        return b"".join(pieces)


def whole_object(kind: Any, endpoint: Endpoint, choices: Sequence[ChoiceDelta], **fields: Any) -> Any:
    rig = Rig()
    with kind(a_call(endpoint, **fields), ECHO, rig.services) as response:
        for choice in choices:
            response.put(choice)
        num_bytes = asyncio.run(response.finish(OUTCOME))
        text = b"".join(response.pieces())
    assert len(text) == num_bytes
    assert rig.budget.used(Account.REQUESTS) == 0
    return json.loads(text)


def stream(kind: Any, endpoint: Endpoint, choices: Sequence[ChoiceDelta], **fields: Any) -> list[Any]:
    rig = Rig()
    with kind(a_call(endpoint, stream=True, **fields), ECHO, rig.services, rig.queue) as response:
        for choice in choices:
            response.put(choice)
        asyncio.run(response.finish(OUTCOME))
        events = rig.events()
    assert rig.budget.used(Account.REQUESTS) == 0
    return events


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name not in ("created_at", "completed_at")}


FINISHES = st.sampled_from((FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS))
CASE = {"items": ITEMS, "size": st.integers(1, 9), "group": st.integers(1, 4), "finish": FINISHES}


@settings(max_examples=sized(60, 1000), deadline=None)
@given(**CASE)
def test_response_events_join_to_the_whole_response(
    items: list[Item], size: int, group: int, finish: FinishReason
) -> None:
    response = whole_object(ResponseObject, Endpoint.RESPONSES, deltas(items, 99, 99, finish))
    is_cut = finish is FinishReason.LENGTH
    assert response["status"] == ("incomplete" if is_cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert [text_of(item) for item in response["output"]] == [item.text for item in items]
    statuses = ["completed"] * len(items)
    statuses[-1:] = ["incomplete" if is_cut else "completed"] * bool(items)
    assert [item["status"] for item in response["output"]] == statuses
    Response.model_validate(response, strict=True)

    events = stream(ResponseEvents, Endpoint.RESPONSES, deltas(items, size, group, finish))
    for event in events:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert without_times(events[-1]["response"]) == without_times(response)
    assert joined_items(events) == response["output"]


def text_of(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def joined_items(events: Sequence[dict[str, Any]]) -> list[Any]:
    """Build the items from the deltas, and compare each with the events at its end."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        item = items[event["output_index"]] if event.get("output_index", len(items)) < len(items) else None
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif item is None:
            continue
        elif kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
        else:
            assert event.get("text", event.get("arguments")) == text_of(item)
        assert item is None or kind == "output_item.done" or event["item_id"] == item["id"]
    return items


@settings(max_examples=sized(60, 1000), deadline=None)
@given(**CASE)
def test_message_events_join_to_the_whole_message(
    items: list[Item], size: int, group: int, finish: FinishReason
) -> None:
    message = whole_object(MessageObject, Endpoint.MESSAGES, deltas(items, 99, 99, finish))
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert (message["stop_reason"], message["stop_sequence"]) == (reasons[finish.value], None)
    kinds = {PartKind.REASONING: "thinking", PartKind.CONTENT: "text", PartKind.TOOL_CALL: "tool_use"}
    assert [block["type"] for block in message["content"]] == [kinds[item.kind] for item in items]
    for block, item in zip(message["content"], items, strict=True):
        field = "input" if block["type"] == "tool_use" else block["type"]
        assert block[field] == (json.loads(item.text) if field == "input" else item.text)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == USAGE.num_prompt_tokens

    events = stream(MessageEvents, Endpoint.MESSAGES, deltas(items, size, group, finish))
    assert joined_message(events) == message


def joined_message(events: Sequence[dict[str, Any]]) -> Any:
    """Build a message from its events, as Anthropic's client does."""
    first, *events, before_last, last = events
    assert (first["type"], before_last["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message, texts, is_open = first["message"], [], False
    assert message["usage"]["input_tokens"] == len("user: hi\nassistant: ")
    for event in events:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(texts))
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(texts) - 1
            kind = event["delta"]["type"].removesuffix("_delta")
            if kind == "signature":
                message["content"][-1]["signature"] = event["delta"]["signature"]
            else:
                texts[-1] += event["delta"]["partial_json" if kind == "input_json" else kind]
        else:
            assert event == {"type": "content_block_stop", "index": len(texts) - 1}
        is_open = event["type"] != "content_block_stop"
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
        else:
            block[block["type"]] = text
    return {**message, **before_last["delta"], "usage": before_last["usage"]}


@pytest.mark.parametrize("arguments", ['{"a": "b', "[1]", "", '{"a": NaN}', "[" * 5000, '{"a": ' + "9" * 5000 + "}"])
def test_arguments_that_are_no_json_object_become_an_empty_one(arguments: str) -> None:
    items = [Item(PartKind.TOOL_CALL, arguments, "f")]
    message = whole_object(MessageObject, Endpoint.MESSAGES, deltas(items, 10**4, 9, FinishReason.LENGTH))
    assert message["content"] == [{"type": "tool_use", "id": "call_0", "name": "f", "input": {}}]


def test_stop_string_is_the_stop_sequence_of_a_message() -> None:
    choice = ChoiceDelta(index=0, text="a", finish=FinishReason.STOP, stop_string="b")
    message = whole_object(MessageObject, Endpoint.MESSAGES, [choice])
    assert message["content"] == [{"type": "text", "text": "a"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "b")


def test_logprobs_belong_to_the_message_even_if_its_text_is_held_back() -> None:
    def choice(text: str, *tokens: int, kind: PartKind = PartKind.CONTENT, finish: Any = None) -> ChoiceDelta:
        parts = (MessagePart(kind=kind, text=text),) if text else ()
        logprobs = tuple(TokenLogprobs(logprob=-float(token), top=((token, -1.0),)) for token in tokens)
        return ChoiceDelta(index=0, parts=parts, token_ids=tokens, logprobs=logprobs, finish=finish)

    choices = [
        choice("hm", 97, kind=PartKind.REASONING),
        choice("", 98),
        choice("b", 99),
        choice("", 100),
        choice("", 101, finish=FinishReason.STOP),
    ]
    fields = {"logprobs": True, "top_logprobs": 1}
    events = stream(ResponseEvents, Endpoint.RESPONSES, choices, **fields)
    output = events[-1]["response"]["output"]
    assert [entry["token"] for entry in output[1]["content"][0]["logprobs"]] == ["b", "c", "d", "e"]
    assert output[1]["content"][0]["logprobs"][0]["top_logprobs"][0]["logprob"] == -1.0
    assert joined_items(events) == output
    assert whole_object(ResponseObject, Endpoint.RESPONSES, choices, **fields)["output"] == output


def test_logprobs_that_wait_for_their_text_need_memory() -> None:
    rig = Rig(num_bytes=30_000)
    logprobs = tuple(TokenLogprobs(logprob=-1.0, top=((97, -1.0),) * 20) for _ in range(20))
    waiting = ChoiceDelta(index=0, token_ids=(97,) * 20, logprobs=logprobs)
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    with ResponseObject(a_call(Endpoint.RESPONSES, **fields), b"", rig.services) as response:
        response.put(waiting)
        assert rig.budget.used(Account.REQUESTS) > 20_000
        with pytest.raises(OverBudget):
            response.put(waiting)


def test_failed_response_ends_with_what_it_has() -> None:
    rig = Rig()
    with ResponseEvents(a_call(Endpoint.RESPONSES, stream=True), ECHO, rig.services, rig.queue) as response:
        response.put(ChoiceDelta(index=0, text="half"))
        response.fail(FAILURE)
        *_, item_done, last = rig.events()
    EVENT.validate_python(last, strict=True)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the worker is lost"}
    assert last["response"]["output"] == [item_done["item"]]
    assert (text_of(item_done["item"]), item_done["item"]["status"]) == ("half", "incomplete")


def test_failed_message_ends_with_an_error_event() -> None:
    rig = Rig()
    with MessageEvents(a_call(Endpoint.MESSAGES, stream=True), b"", rig.services, rig.queue) as response:
        response.put(ChoiceDelta(index=0, text="half"))
        response.fail(FAILURE)
        last = rig.events()[-1]
    assert last["error"] == {"type": "overloaded_error", "message": "the worker is lost"}
    assert len(last["request_id"]) == 32


@pytest.mark.parametrize(
    ("kind", "endpoint"), [(ResponseObject, Endpoint.RESPONSES), (MessageObject, Endpoint.MESSAGES)]
)
def test_response_that_outgrows_its_estimate_needs_memory(kind: Any, endpoint: Endpoint) -> None:
    rig = Rig(num_bytes=4000)
    with kind(a_call(endpoint), b"", rig.services) as response:
        before = rig.budget.used(Account.REQUESTS)
        response.put(ChoiceDelta(index=0, text="x" * (before + 1)))
        assert rig.budget.used(Account.REQUESTS) > before
        with pytest.raises(OverBudget):
            response.put(ChoiceDelta(index=0, text="x" * 4000))
    assert rig.budget.used(Account.REQUESTS) == 0


def test_stream_of_a_response_counts_what_it_repeats_once() -> None:
    rig = Rig()
    text = "x" * 100_000
    with ResponseEvents(a_call(Endpoint.RESPONSES, stream=True), ECHO, rig.services, rig.queue) as response:
        response.put(ChoiceDelta(index=0, text=text, finish=FinishReason.STOP))
        asyncio.run(response.finish(OUTCOME))
        assert rig.budget.used(Account.REQUESTS) == pytest.approx(len(text) + len(ECHO), rel=0.05)
        assert rig.unread.num_bytes == pytest.approx(len(text), rel=0.02)
        assert rig.queue.num_bytes == pytest.approx(5 * len(text), rel=0.1)
        assert [text_of(item) for item in rig.events()[-1]["response"]["output"]] == [text]
