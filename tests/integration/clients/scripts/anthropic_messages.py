"""`anthropic`: messages, streams, tools, the tool runner, structured output and the number of tokens."""

from typing import Literal

import anthropic
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, WEATHER_TOOL, error_of, get_weather
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
FUNCTION = WEATHER_TOOL["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
GREEDY = {"extra_body": {"temperature": 0}}
"""The client has no argument for the temperature."""
MESSAGES = [{"role": "user", "content": QUESTION}]


class Place(BaseModel):
    """A place. The client removes bounds of numbers from schemas, so there are none."""

    city: Literal["Paris", "Oslo"]
    is_sunny: bool


def text_and_stream() -> None:
    """The events of a stream join to the whole answer."""
    options = {"model": MODEL, "messages": MESSAGES, "system": "Answer.", "max_tokens": 24, **GREEDY}
    whole = client.messages.create(**options)
    assert whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


def tools() -> None:
    """A call is made, its result is sent back, and an answer follows."""
    messages = list(MESSAGES)
    answer = client.messages.create(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=MAX_TOKENS,
    )
    assert answer.stop_reason == "tool_use", answer
    uses = [block for block in answer.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)} for use in uses]
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    last = client.messages.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=8, **GREEDY
    )
    assert last.content[0].text
    with client.messages.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_tokens=MAX_TOKENS,
    ) as stream:
        final = stream.get_final_message()
    (use,) = [block for block in final.content if block.type == "tool_use"]
    get_weather(**use.input)


def count() -> None:
    """The number of tokens is that of the message's usage, in which cached tokens are counted apart."""
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Answer.")
    used = client.messages.create(model=MODEL, messages=MESSAGES, system="Answer.", max_tokens=1)
    assert counted.input_tokens == used.usage.input_tokens + used.usage.cache_read_input_tokens


def runner() -> None:
    """The tool runner goes on without a thread, which the server refuses, and calls the tools itself."""
    called = []

    @anthropic.beta_tool
    def look_up(word: Literal["path", "join"]) -> str:
        """Look up a word.

        Args:
            word: The word.
        """
        called.append(word)
        return "found"

    answers = list(
        client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=MAX_TOKENS,
            messages=MESSAGES,
            tools=[look_up],
            tool_choice={"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
            max_iterations=2,
        )
    )
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert len(called) == 2


def parse() -> None:
    """`parse` constrains the answer, and reads it."""
    answer = client.messages.parse(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES, output_format=Place)
    assert isinstance(answer.parsed_output, Place)


def errors() -> None:
    """Refusals arrive as the client's own exceptions, with the id of the request."""
    error = error_of(anthropic.NotFoundError, client.messages.create, model="other", messages=MESSAGES, max_tokens=1)
    assert error.body["error"]["type"] == "not_found_error", error.body
    assert error.request_id == error.body["request_id"]
    assert [model.id for model in client.models.list()] == [MODEL]


text_and_stream()
tools()
runner()
parse()
count()
errors()
