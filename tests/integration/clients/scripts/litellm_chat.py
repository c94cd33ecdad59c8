"""`litellm`: chat, streams, tools and structured output through its `openai/` provider."""

import json

import litellm
from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, WEATHER_TOOL, Weather, error_of, get_weather

litellm.telemetry = False
COMMON = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": KEY,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": MAX_TOKENS,
    "seed": 9,
}

whole = litellm.completion(**{**COMMON, "temperature": 0, "max_tokens": 16})
parts = litellm.completion(**{**COMMON, "temperature": 0, "max_tokens": 16}, stream=True)
assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content

called = litellm.completion(**COMMON, tools=[WEATHER_TOOL], tool_choice="required", parallel_tool_calls=False)
assert called.choices[0].finish_reason == "tool_calls"
for call in called.choices[0].message.tool_calls:
    get_weather(**json.loads(call.function.arguments))

FOR_ANTHROPIC = {**COMMON, "model": f"anthropic/{MODEL}", "api_base": URL, "seed": None}
message = litellm.completion(**{**FOR_ANTHROPIC, "max_tokens": 16, "temperature": 0})
assert message.choices[0].message.content == whole.choices[0].message.content

for arguments in (COMMON, FOR_ANTHROPIC):
    answer = litellm.completion(**arguments, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)

LONG = [{"role": "user", "content": "word " * 20_000}]
for asked in ({"messages": LONG}, {"max_tokens": 100_000}):
    error_of(litellm.ContextWindowExceededError, litellm.completion, **{**COMMON, **asked})
    error_of(litellm.ContextWindowExceededError, litellm.completion, **{**FOR_ANTHROPIC, **asked})
