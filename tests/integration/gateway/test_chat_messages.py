"""Tool calls and reasoning of chats over HTTP. Stub workers write the answers in the formats of models."""

import json
from typing import Any

import openai
import pytest

from tests.grammar_checks import InProcessGrammarCheck
from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, stream_events
from tests.scripted_chats import chat_tokenizer, ids_of, write
from tests.unit.gateway.fakes import until

PD = (("p0", "prefill"), ("d0", "decode"))
CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500}
ARGUMENTS = '{"city": "Zürich \\"x\\""}'
FAMILIES = {
    "qwen3": (
        "<think>\nso\n</think>\n\nI look.\n",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "<|im_end|>",
    ),
    "deepseek": (
        "so</think>I look.",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
    ),
}
THINKING = {"chat_template_kwargs": {"thinking": True}}


def gateway_of(family: str) -> Any:
    return http_gateway(*PD, tokenizer=chat_tokenizer(family))


async def answer(gateway: HttpGateway, **fields: Any) -> Any:
    response = await gateway.post(CHAT, HELLO | THINKING | fields)
    assert response.status_code == 200, response.text
    return response.json()


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """Join the deltas of a stream as the OpenAI client does. Returns (message, finish reason)."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    (finish,) = [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]]
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["type"] == "function"
                assert call["id"]
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, finish


@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_and_reasoning_are_parts_of_the_message(family: str) -> None:
    begin, call, end = FAMILIES[family]
    async with gateway_of(family) as gateway:
        write(gateway.cluster, begin + call + end)
        got = await answer(gateway, tools=[TOOL])
        (choice,) = got["choices"]
        message = choice["message"]
        assert (message["role"], message["content"].strip(), message["reasoning_content"].strip()) == (
            "assistant",
            "I look.",
            "so",
        )
        (called,) = message["tool_calls"]
        assert called["type"] == "function"
        assert called["function"]["name"] == "get_weather"
        assert json.loads(called["function"]["arguments"]) == json.loads(ARGUMENTS)
        assert choice["finish_reason"] == "tool_calls"
        assert got["usage"]["completion_tokens"] == len(ids_of(begin + call + end))
        num_reasoning = got["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 2 <= num_reasoning <= len(ids_of(begin)) - len("I look.")

        events = await stream_events(gateway, CHAT, HELLO | THINKING | {"tools": [TOOL]})
        streamed, finish = joined(events)
        assert finish == "tool_calls"
        assert streamed["content"] == message["content"]
        assert streamed["reasoning_content"] == message["reasoning_content"]
        assert streamed["tool_calls"] == [called["function"]]
        first = next(n for n, event in enumerate(events) if "tool_calls" in event["choices"][0]["delta"])
        assert first < len(events) - 3, "the name arrives before the last arguments"


@pytest.mark.parametrize("family", FAMILIES)
async def test_message_of_calls_only_has_no_content(family: str) -> None:
    _, call, end = FAMILIES[family]
    async with gateway_of(family) as gateway:
        write(gateway.cluster, call + end)
        got = await answer(gateway, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
        message = got["choices"][0]["message"]
        assert message["content"] is None
        assert "reasoning_content" not in message
        assert len(message["tool_calls"]) == 1
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_tool_and_reasoning_options_decide_what_the_message_has() -> None:
    begin, call, end = FAMILIES["qwen3"]
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, begin + call + "\n" + call + end)
        got = await answer(gateway, tools=[TOOL], tool_choice="none")
        assert "<tool_call>" in got["choices"][0]["message"]["content"]
        assert got["choices"][0]["finish_reason"] == "stop"
        got = await answer(gateway)
        assert "tool_calls" not in got["choices"][0]["message"]
        got = await answer(gateway, tools=[TOOL])
        calls = got["choices"][0]["message"]["tool_calls"]
        assert len(calls) == 2
        assert calls[0]["id"] != calls[1]["id"]
        got = await answer(gateway, tools=[TOOL], parallel_tool_calls=False, include_reasoning=False)
        assert len(got["choices"][0]["message"]["tool_calls"]) == 1
        assert "reasoning_content" not in got["choices"][0]["message"]
        assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        legacy = {"functions": [TOOL["function"]], "function_call": "auto"}
        got = await answer(gateway, **legacy)
        assert got["choices"][0]["finish_reason"] == "function_call"
        assert got["choices"][0]["message"]["function_call"] == calls[0]["function"]
        events = await stream_events(gateway, CHAT, HELLO | legacy)
        deltas = [event["choices"][0]["delta"].get("function_call", {}) for event in events]
        assert "".join(delta.get("arguments", "") for delta in deltas) == calls[0]["function"]["arguments"]
        assert [delta["name"] for delta in deltas if "name" in delta] == ["get_weather"]


async def test_stop_string_ends_the_content_and_not_the_reasoning() -> None:
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, "<think>a stop b</think>c sto stop d<|im_end|>")
        for stream in (False, True):
            if stream:
                message, finish = joined(await stream_events(gateway, CHAT, HELLO | {"stop": "stop"}))
            else:
                choice = (await answer(gateway, stop="stop"))["choices"][0]
                message, finish = choice["message"], choice["finish_reason"]
            assert message["reasoning_content"] == "a stop b"
            assert message["content"].strip() == "c sto"
            assert finish == "stop"


async def test_malformed_call_is_content() -> None:
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, '<tool_call>\n{"name": oops}\n</tool_call><|im_end|>')
        choice = (await answer(gateway, tools=[TOOL]))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert '{"name": oops}' in choice["message"]["content"]


async def test_each_choice_has_its_own_message() -> None:
    begin, call, end = FAMILIES["qwen3"]
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, begin + call + end, "just text<|im_end|>")
        got = await answer(gateway, tools=[TOOL], n=2, logprobs=True)
        first, second = got["choices"]
        assert [choice["finish_reason"] for choice in got["choices"]] == ["tool_calls", "stop"]
        assert second["message"] == {"role": "assistant", "content": "just text", "refusal": None}
        assert len(first["logprobs"]["content"]) == len(ids_of(begin + call + end))


async def test_openai_client_runs_a_tool_loop() -> None:
    begin, call, end = FAMILIES["qwen3"]
    async with (
        gateway_of("qwen3") as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        write(gateway.cluster, begin + call + end)
        messages: list[Any] = list(HELLO["messages"])
        first = await client.chat.completions.create(model="demo", messages=messages, tools=[TOOL], max_tokens=300)
        answered = first.choices[0].message
        messages += [answered, {"role": "tool", "tool_call_id": answered.tool_calls[0].id, "content": "17 °C"}]
        write(gateway.cluster, "It is warm.<|im_end|>")
        second = await client.chat.completions.create(model="demo", messages=messages, tools=[TOOL], max_tokens=300)
        assert second.choices[0].message.content == "It is warm."
        prompt = bytes(id_ for id_ in gateway.cluster.scheduler.workers[0].jobs[-1].token_ids if id_ < 256).decode()
        assert "<tool_response>\n17 °C\n</tool_response>" in prompt
        assert '"arguments": {"city": "Zürich \\"x\\""}}' in prompt


async def test_template_without_tools_refuses_them() -> None:
    async with gateway_of("training") as gateway:
        response = await gateway.post(CHAT, HELLO | {"tools": [TOOL]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        response = await gateway.post(CHAT, HELLO | {"chat_template": "{{ messages }}"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_field"


async def test_own_template_is_used_if_allowed() -> None:
    async with http_gateway(*PD, tokenizer=chat_tokenizer("qwen3"), allow_request_chat_template=True) as gateway:
        write(gateway.cluster, "x<|im_end|>")
        await answer(gateway, chat_template="<{{ messages[0].content }}>{{ who }}", chat_template_kwargs={"who": "me"})
        assert bytes(list(gateway.cluster.scheduler.workers[0].jobs[-1].token_ids)) == b"<hi>me"
        for template in ("{% for %}", "{{ raise_exception('no') }}"):
            response = await gateway.post(CHAT, HELLO | {"chat_template": template})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


async def test_chat_that_the_template_refuses_names_the_field_of_the_client() -> None:
    async with gateway_of("mistral") as gateway:
        twice = [{"role": "assistant", "content": "a"}] * 2
        for path, field in ((CHAT, "messages"), ("/v1/responses", "input")):
            response = await gateway.post(path, {field: [*HELLO["messages"], *twice]})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert "does not accept this chat" in error["message"]


async def test_workers_get_the_grammar_of_required_calls() -> None:
    begin, call, end = FAMILIES["qwen3"]
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, begin.replace("I look.\n", "") + call + end)
        named = {"type": "function", "function": {"name": "get_weather"}}
        strict = {**TOOL, "function": TOOL["function"] | {"strict": True}}
        for fields in ({"tools": [TOOL], "tool_choice": named}, {"tools": [TOOL], "tool_choice": "required"}):
            choice = (await answer(gateway, **fields))["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert len(choice["message"]["tool_calls"]) == 1
            jobs = [job for worker in gateway.cluster.scheduler.workers for job in worker.jobs[-1:]]
            assert len(jobs) == 2
            assert all("get_weather" in job.sampling.grammar for job in jobs)
        for fields, has_grammar in (({"tools": [TOOL]}, False), ({"tools": [strict]}, True), ({}, False)):
            await answer(gateway, **fields)
            assert bool(gateway.cluster.scheduler.workers[0].jobs[-1].sampling.grammar) is has_grammar


@pytest.mark.parametrize(
    ("field", "param"),
    [({"$ref": "#/$defs/none"}, "tools[0].function.parameters"), ({"type": "string", "pattern": "("}, "tools")],
)
async def test_schema_that_cannot_be_a_grammar_is_refused(field: dict[str, Any], param: str) -> None:
    function = {"name": "f", "description": "d", "strict": True}
    tool = {"type": "function", "function": function | {"parameters": {"type": "object", "properties": {"a": field}}}}
    tokenizer = chat_tokenizer("qwen3")
    async with http_gateway(*PD, tokenizer=tokenizer, grammar_check=InProcessGrammarCheck(tokenizer)) as gateway:
        response = await gateway.post(CHAT, HELLO | {"tools": [tool], "tool_choice": "required"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_grammar", param)


async def test_unknown_format_of_calls_refuses_required_calls() -> None:
    async with http_gateway(*PD, tokenizer=chat_tokenizer("qwen3"), tool_parser="none") as gateway:
        response = await gateway.post(CHAT, HELLO | {"tools": [TOOL], "tool_choice": "required"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tool_choice"


async def test_tokenize_counts_the_tokens_of_tools_and_variables() -> None:
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, "x<|im_end|>")
        fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
        used = (await answer(gateway, **fields))["usage"]["prompt_tokens"]
        response = await gateway.post("/tokenize", {"messages": HELLO["messages"]} | fields)
        assert response.json()["count"] == used
        response = await gateway.post("/tokenize", {"messages": HELLO["messages"], "chat_template": "{{ 1 }}"})
        assert response.status_code == 400


REQUIRED = {"tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("family", FAMILIES)
async def test_required_call_that_is_cut_has_no_delimiters_as_content(family: str) -> None:
    _, call, end = FAMILIES[family]
    num_calls = set()
    async with gateway_of(family) as gateway:
        write(gateway.cluster, call + end)
        for num_missing in (1, 2, 8, 20, 30, len(ids_of(call)) - 1):
            fields = REQUIRED | {"max_tokens": len(ids_of(call)) - num_missing}
            choice = (await answer(gateway, **fields))["choices"][0]
            assert choice["finish_reason"] == "length"
            assert not choice["message"]["content"]
            calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
            assert all(ARGUMENTS.startswith(each["arguments"]) for each in calls)
            streamed, finish = joined(await stream_events(gateway, CHAT, HELLO | fields))
            assert (streamed["content"], streamed["tool_calls"], finish) == ("", calls, "length")
            num_calls.add(len(calls))
    assert num_calls == {0, 1}


async def test_constrained_content_after_reasoning_arrives_as_it_was_written() -> None:
    text = "\n\n x <tool_call> \n"
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, f"<think>so</think>{text}<|im_end|>")
        for fields in (
            {"structured_outputs": {"regex": r"\s+x .*\s+"}},
            {"structured_outputs": {"choice": [text, "y"]}},
        ):
            message = (await answer(gateway, **fields))["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == (text, "so")
            streamed, _ = joined(await stream_events(gateway, CHAT, HELLO | fields))
            assert (streamed["content"], streamed["reasoning_content"]) == (text, "so")
        write(gateway.cluster, '<think>so</think>\n\n{"a": " "}<|im_end|>')
        message = (await answer(gateway, response_format={"type": "json_object"}))["choices"][0]["message"]
        assert message["content"] == '{"a": " "}'


async def test_generation_ends_with_the_only_call() -> None:
    begin, call, end = FAMILIES["qwen3"]
    arguments_end = begin + call.removesuffix("\n</tool_call>")
    async with gateway_of("qwen3") as gateway:
        write(gateway.cluster, f"{begin}{call}\n{call}{end}", "x" * 150 + end)
        for fields in ({"parallel_tool_calls": False}, {"functions": [TOOL["function"]], "function_call": "auto"}):
            fields = {"tools": [TOOL], **fields} if "functions" not in fields else fields
            got = await answer(gateway, n=2, **fields)
            legacy = "functions" in fields
            first, second = got["choices"]
            assert first["finish_reason"] == ("function_call" if legacy else "tool_calls")
            calls = [first["message"]["function_call"]] if legacy else first["message"]["tool_calls"]
            assert len(calls) == 1
            assert (second["finish_reason"], second["message"]["content"]) == ("stop", "x" * 150)
            assert got["usage"]["completion_tokens"] == len(ids_of(arguments_end)) + 151
            worker = gateway.cluster.scheduler.workers[1]
            job = worker.jobs[-1].job
            await until(lambda: (job, (0,)) in [(each.job, each.sample_indices) for each in worker.cancels])  # noqa: B023
        usage = {"stream_options": {"include_usage": True}}
        *events, last = await stream_events(
            gateway, CHAT, HELLO | THINKING | usage | {"tools": [TOOL], "parallel_tool_calls": False}
        )
        message, finish = joined(events)
        assert (len(message["tool_calls"]), finish) == (1, "tool_calls")
        assert json.loads(message["tool_calls"][0]["arguments"]) == json.loads(ARGUMENTS)
        assert last["usage"]["completion_tokens"] == len(ids_of(arguments_end))


@pytest.mark.parametrize("stream", [False, True])
async def test_visible_special_tokens_and_calls(stream: bool) -> None:
    """The token that ends an answer is not shown, like a stop string; other special tokens are."""
    _, call, end = FAMILIES["qwen3"]

    async def message_of(text: str, **fields: Any) -> tuple[str, int, str]:
        write(gateway.cluster, text)
        fields = {"tools": [TOOL], "skip_special_tokens": False, **fields}
        if stream:
            message, finish = joined(await stream_events(gateway, CHAT, HELLO | fields))
        else:
            choice = (await answer(gateway, **fields))["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
        return message["content"] or "", len(message.get("tool_calls", ())), finish

    async with gateway_of("qwen3") as gateway:
        assert await message_of(call + end) == ("", 1, "tool_calls")
        assert await message_of(f"a{end}") == ("a", 0, "stop")
        included = {"include_stop_str_in_output": True}
        assert await message_of(f"a{end}", **included) == (f"a{end}", 0, "stop")
        assert await message_of(call + end, **included) == (end, 1, "tool_calls")
        text = f"a{end}b{call}{end}c"
        unending = {"ignore_eos": True, "max_tokens": len(ids_of(text))}
        assert await message_of(f"{text}more", **unending) == (f"a{end}b{end}c", 1, "length")
        hidden = {"skip_special_tokens": True}
        assert await message_of(f"{text}more", **unending, **hidden) == ("abc", 1, "length")
