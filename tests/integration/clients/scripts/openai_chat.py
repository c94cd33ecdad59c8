"""`openai`: chat completions with streams, logprobs, structured output and a loop of tool calls."""

import asyncio
import json

import openai
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, WEATHER_TOOL, Weather, error_of, get_weather
from openai.types.chat import ChatCompletionAllowedToolChoiceParam

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]


def chat_and_stream() -> None:
    """A streamed answer has the text of a whole one, and its usage."""
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=24, logprobs=True, top_logprobs=2
    )
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) <= 24
    assert whole.system_fingerprint
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def parse() -> None:
    """`parse` returns an object of the pydantic model, also from a stream."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, seed=1, max_completion_tokens=MAX_TOKENS
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Weather, seed=1, max_completion_tokens=MAX_TOKENS
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    anything = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        max_completion_tokens=MAX_TOKENS,
        temperature=0,
        logit_bias={},
    )
    if anything.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(anything.choices[0].message.content), dict)


def tools() -> None:
    """A required call is made, its result is sent back, and an answer follows."""
    messages = list(MESSAGES)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        max_completion_tokens=MAX_TOKENS,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    result = get_weather(**json.loads(call.function.arguments))
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER_TOOL], tool_choice="none", temperature=0, max_completion_tokens=8
    )
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


def allowed_tools() -> None:
    """Only the allowed tool is called, though another one is sent, too."""
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[other, WEATHER_TOOL],
            tool_choice=ChatCompletionAllowedToolChoiceParam(type="allowed_tools", allowed_tools=allowed),
            parallel_tool_calls=False,
            seed=seed,
            max_completion_tokens=MAX_TOKENS,
        )
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]


def streamed_tools() -> None:
    """The deltas of a named call join to a call with valid arguments."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
        tool_choice=named,
        seed=3,
        max_completion_tokens=MAX_TOKENS,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert [event.name for event in done] == ["get_weather"]
    assert isinstance(call.function.parsed_arguments, Weather)


def completions() -> None:
    """The older completions endpoint, with `echo` and several prompts."""
    prompts = ["import os", "def f("]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=4, temperature=0, echo=True, logprobs=1)
    assert all(choice.text.startswith(prompt) for choice, prompt in zip(answer.choices, prompts, strict=True))
    streamed = {0: [], 1: []}
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=4, temperature=0, echo=True, logprobs=1, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    for choice in answer.choices:
        assert streamed[choice.index] == list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))


def errors() -> None:
    """Refusals arrive as the client's own exceptions."""
    error = error_of(
        openai.BadRequestError,
        client.chat.completions.create,
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    )
    assert "$ref" in str(error) or "nowhere" in str(error), error


async def concurrent() -> None:
    """The asynchronous client runs several requests at once."""
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as each:
        answers = await asyncio.gather(
            *(
                each.chat.completions.parse(
                    model=MODEL, messages=MESSAGES, response_format=Weather, seed=i, max_completion_tokens=MAX_TOKENS
                )
                for i in range(4)
            )
        )
    assert all(isinstance(answer.choices[0].message.parsed, Weather) for answer in answers)


chat_and_stream()
parse()
tools()
allowed_tools()
streamed_tools()
completions()
errors()
asyncio.run(concurrent())
assert MODEL in [model.id for model in client.models.list()]
