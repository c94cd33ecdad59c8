"""`langchain-openai`: structured output by both methods, and bound tools."""

from common import KEY, MAX_TOKENS, MODEL, QUESTION, URL, Weather, error_of, get_weather
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=MAX_TOKENS, temperature=0.8, seed=5, max_retries=0
)
weather_tool = tool(get_weather)

for method in ("json_schema", "function_calling"):
    answer = model.with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(answer, Weather), (method, answer)

responses = ChatOpenAI(
    base_url=f"{URL}/v1",
    api_key=KEY,
    model=MODEL,
    max_tokens=MAX_TOKENS,
    temperature=0,
    max_retries=0,
    use_responses_api=True,
)
assert responses.invoke(QUESTION).text == "".join(chunk.text for chunk in responses.stream(QUESTION))

messages = [HumanMessage(QUESTION)]
bound = model.bind_tools([weather_tool], tool_choice="any", parallel_tool_calls=False)
called = bound.invoke(messages)
assert called.tool_calls, called
messages.append(called)
messages += [ToolMessage(weather_tool.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
assert model.bind(max_tokens=8).invoke(messages).content

streamed = None
for chunk in bound.stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed is not None
assert streamed.tool_calls == [{**call, "id": streamed.tool_calls[i]["id"]} for i, call in enumerate(called.tool_calls)]

for each in (model, responses):
    error_of(ContextOverflowError, each.invoke, input="word " * 20_000)
