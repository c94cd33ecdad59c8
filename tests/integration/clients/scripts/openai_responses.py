"""`openai`: the responses API, stateless: text, streams, structured output, tools."""

import json

import openai
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, WEATHER_TOOL, Weather, error_of, get_weather

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
TOOL = {"type": "function", **WEATHER_TOOL["function"], "strict": True}


def text_and_stream() -> None:
    """The events of a stream join to the whole answer, in the order that the API defines."""
    options = {"model": MODEL, "input": QUESTION, "instructions": "Answer.", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**options)
    assert whole.output_text
    assert whole.usage.output_tokens <= 24
    with client.responses.stream(**options) as stream:
        events = list(stream)
    final = events[-1].response  # the client's own final response is only a completed one
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"], types
    assert types[-1] in ("response.completed", "response.incomplete")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def structured() -> None:
    """`text.format` constrains the answer, and `parse` reads it."""
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=MAX_TOKENS)
    assert isinstance(answer.output_parsed, Weather)


def tools() -> None:
    """A call and its output are sent back as items of the input."""
    items = [{"role": "user", "content": QUESTION}]
    answer = client.responses.create(
        model=MODEL,
        input=items,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=MAX_TOKENS,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls, answer.output
    items += answer.output
    for call in calls:
        output = get_weather(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    last = client.responses.create(
        model=MODEL, input=items, tools=[TOOL], tool_choice="none", temperature=0, max_output_tokens=8
    )
    assert last.output_text


def refused() -> None:
    """State on the server is refused by name."""
    for name, value in (("previous_response_id", "resp_1"), ("store", True), ("background", True)):
        error = error_of(openai.BadRequestError, client.responses.create, model=MODEL, input=QUESTION, **{name: value})
        assert name in str(error), error


text_and_stream()
structured()
tools()
refused()
