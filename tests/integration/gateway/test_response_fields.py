"""Fields that change the form of a response, over a real server on loopback."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway.http_gateway import HttpGateway, http_gateway, stream_events
from tests.integration.gateway.test_api_keys import ALICE, EVE, bearer, key_ring
from tests.unit.gateway.fakes import answer_to, kill_at

PD = (("p0", "prefill"), ("d0", "decode"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(*PD) as g:
        yield g


async def completed(gateway: HttpGateway, **body: Any) -> list[str]:
    """Return the texts of the choices, which a streamed response has, too."""
    answer = await gateway.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    texts = [choice["text"] for choice in answer.json()["choices"]]
    streamed = dict.fromkeys(range(len(texts)), "")
    for event in await stream_events(gateway, COMPLETIONS, body):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == texts
    return texts


async def test_ignored_fields_are_named_in_every_kind_of_response(gateway: HttpGateway) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 2}),
        (CHAT, HELLO | {"max_tokens": 2}),
        ("/tokenize", HELLO),
        ("/detokenize", {"tokens": [65]}),
    ):
        for more in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
            answer = await gateway.post(path, body | more | {"max_token": 3, "col, our": 1})
            assert (answer.status_code, answer.headers["x-baton-ignored-fields"]) == (200, "max_token, col%2C%20our")
            assert "x-baton-ignored-fields" not in (await gateway.post(path, body | more)).headers
    metrics = (await gateway.client.get("/metrics")).text
    assert 'baton_ignored_fields_total{field="max_token"} 6.0' in metrics


async def test_strict_gateway_refuses_unknown_fields_on_every_route() -> None:
    async with http_gateway(*PD, strict_fields=True) as gateway:
        for path, body in (
            (COMPLETIONS, {"prompt": "hi"}),
            (CHAT, HELLO),
            ("/tokenize", HELLO),
            ("/detokenize", {"tokens": [65]}),
        ):
            answer = await gateway.post(path, body | {"colour": 3})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_field", "colour")


async def test_echo_begins_each_choice_with_its_prompt(gateway: HttpGateway) -> None:
    output = [answer_to(b"hi", 3, sample).decode() for sample in (0, 1)]
    assert await completed(gateway, prompt="hi", echo=True, max_tokens=3, n=2) == ["hi" + text for text in output]
    long = 'n\u00e9 "\\\n' * 20
    ids = list("n\u00e9".encode())
    assert await completed(gateway, prompt=[long, "b"], echo=True, max_tokens=0) == [long, "b"]
    assert await completed(gateway, prompt=ids, echo=True, max_tokens=0) == ["n\u00e9"]
    assert await completed(gateway, prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=0) == ["ef"]


async def test_echo_without_output_reports_no_generated_tokens(gateway: HttpGateway) -> None:
    answer = (await gateway.post(COMPLETIONS, {"prompt": "hi", "echo": True, "max_tokens": 0})).json()
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = await gateway.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_stop_string_is_included_on_request(gateway: HttpGateway) -> None:
    whole = answer_to(b"hi", 8).decode()
    stop = whole[3:5]
    begin = whole[: whole.index(stop)]
    assert await completed(gateway, prompt="hi", max_tokens=8, stop=stop) == [begin]
    assert await completed(gateway, prompt="hi", max_tokens=8, stop=stop, include_stop_str_in_output=True) == [
        begin + stop
    ]


async def test_every_event_has_the_usage_so_far_on_request(gateway: HttpGateway) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, HELLO)):
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *events, last = await stream_events(gateway, path, body | {"max_tokens": 4} | options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == 4
        assert all(
            event["usage"]["total_tokens"] - event["usage"]["completion_tokens"] == last["usage"]["prompt_tokens"]
            for event in events
        )
        assert last["usage"]["completion_tokens"] == 4
        assert last["choices"] == []


async def test_tokens_are_named_by_their_ids_on_request(gateway: HttpGateway) -> None:
    asked = {"max_tokens": 2, "return_tokens_as_token_ids": True}
    completion = (await gateway.post(COMPLETIONS, {"prompt": "hi", "logprobs": 1} | asked)).json()["choices"][0]
    expected = [f"token_id:{token}" for token in answer_to(b"hi", 2)]
    assert completion["logprobs"]["tokens"] == expected
    assert completion["logprobs"]["text_offset"] == [0, 1]
    assert expected[0] in completion["logprobs"]["top_logprobs"][0]
    chat = (await gateway.post(CHAT, HELLO | {"logprobs": True} | asked)).json()["choices"][0]
    assert all(entry["token"] == f"token_id:{entry['bytes'][0]}" for entry in chat["logprobs"]["content"])


async def test_every_object_names_the_weights(gateway: HttpGateway) -> None:
    answer = (await gateway.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2})).json()
    assert answer["system_fingerprint"].startswith("fp_")
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, HELLO)):
        for event in await stream_events(gateway, path, body | {"max_tokens": 2}):
            assert event["system_fingerprint"] == answer["system_fingerprint"]


@pytest.mark.fault("F-46")
async def test_cache_salt_separates_prefixes_within_a_tenant() -> None:
    async with http_gateway(*PD, keys=key_ring()) as gateway:
        hashes = []
        for key, salt in ((ALICE, None), (ALICE, "a"), (ALICE, "a"), (ALICE, "b"), (EVE, "a"), (EVE, None)):
            body = {"prompt": "x" * 64, "max_tokens": 1} | ({} if salt is None else {"cache_salt": salt})
            assert (await gateway.client.post(COMPLETIONS, json=body, headers=bearer(key))).is_success
            hashes.append(gateway.cluster.scheduler.queries[-1].block_hashes)
        assert hashes[1] == hashes[2]
        assert len(set(hashes)) == 5


async def test_prompt_logprobs_have_the_form_of_vllm(gateway: HttpGateway) -> None:
    asked = {"prompt_logprobs": 2, "max_tokens": 2, "n": 2}
    choices = (await gateway.post(COMPLETIONS, {"prompt": ["hi", "x"]} | asked)).json()["choices"]
    first, second = {"logprob": -0.5, "rank": 1, "decoded_token": "i"}, {"logprob": -1.5, "rank": 2}
    expected = [None, {"105": {**first, "logprob": -105.0, "rank": 3}, "106": {**second, "decoded_token": "j"}}]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected, [None], [None]]
    chat = (await gateway.post(CHAT, HELLO | {"prompt_logprobs": 0, "max_tokens": 2})).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][1] == {"115": {"logprob": -115.0, "rank": 3, "decoded_token": "s"}}
    refused = await gateway.post(COMPLETIONS, {"prompt": "hi", "stream": True} | asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    many = await gateway.post(COMPLETIONS, {"prompt": "hi"} | asked | {"prompt_logprobs": 21})
    assert many.status_code == 400


async def test_echo_with_logprobs_covers_the_prompt(gateway: HttpGateway) -> None:
    body = {"prompt": "hi", "echo": True, "logprobs": 1}
    output = answer_to(b"hi", 2).decode()
    for max_tokens in (0, 2):
        answer = (await gateway.post(COMPLETIONS, body | {"max_tokens": max_tokens})).json()
        found = answer["choices"][0]["logprobs"]
        assert found["tokens"] == ["h", "i", *output[:max_tokens]]
        assert found["token_logprobs"] == [None, -105.0, *[-0.5] * max_tokens]
        assert found["text_offset"] == list(range(2 + max_tokens))
        assert found["top_logprobs"][:2] == [None, {"i": -0.5}]
    assert "prompt_logprobs" not in answer["choices"][0]


ECHOED: dict[str, Any] = {"prompt": ["hi", "x", "n\u00e9 " * 40], "echo": True, "logprobs": 1, "n": 2}
"""Prompts of two tokens, of one, and of so many that they are formatted in a thread."""


def joined(choices: Any, name: str) -> dict[int, list[Any]]:
    """Return a list of the logprobs of each choice, over all events."""
    lists: dict[int, list[Any]] = {}
    for choice in choices:
        lists.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get(name, ()))
    return lists


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
async def test_first_event_of_each_choice_has_the_logprobs_of_the_prompt(gateway: HttpGateway, max_tokens: int) -> None:
    body = ECHOED | {"max_tokens": max_tokens, "stream_options": {"continuous_usage_stats": True}}
    answer = (await gateway.post(COMPLETIONS, ECHOED | {"max_tokens": max_tokens})).json()
    events = await stream_events(gateway, COMPLETIONS, body)
    choices = [choice for event in events for choice in event["choices"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert joined(choices, name) == joined(answer["choices"], name)
    num_tokens = [len(prompt.encode()) for prompt in ECHOED["prompt"] for _ in range(2)]
    for index, number in enumerate(num_tokens):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["text"].startswith(ECHOED["prompt"][index // 2])
        assert mine[0]["logprobs"]["token_logprobs"][0] is None
        assert sum(len((choice["logprobs"] or {}).get("tokens", ())) for choice in mine) == number + max_tokens
        assert len(mine[0]["logprobs"]["tokens"]) >= number
    assert events[-1]["usage"] == answer["usage"]
    assert all(event["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] for event in events)


@pytest.mark.parametrize("index", [0, 1, 3])
async def test_streamed_logprobs_of_the_prompt_come_once_when_a_worker_dies(index: int) -> None:
    body = {"prompt": "hello " * 20, "echo": True, "logprobs": 0, "n": 2, "max_tokens": 5}
    async with http_gateway(*PD, ("p1", "prefill"), ("d1", "decode")) as gateway:
        undisturbed = (await gateway.post(COMPLETIONS, body)).json()["choices"]
        gateway.cluster.scheduler.workers[1].before_token = kill_at(index)
        choices = [choice for event in await stream_events(gateway, COMPLETIONS, body) for choice in event["choices"]]
        assert gateway.cluster.scheduler.workers[1].is_dead
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert joined(choices, name) == joined(undisturbed, name)


async def test_the_canonical_grammar_and_token_rules_reach_every_job(gateway: HttpGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, HELLO)):
        rules = {"response_format": answer_format, "bad_words": ["x"], "allowed_token_ids": [98, 97], "max_tokens": 4}
        answer = await gateway.post(path, body | rules)
        assert answer.status_code == 200, answer.text
    jobs = [job for worker in gateway.cluster.scheduler.workers for job in worker.jobs]
    assert len(jobs) == 4
    written = (
        '%llguidance {}\nstart: r0\nr0: %json {"type":"object","properties":{"a":{"type":"integer"}},"x-guidance":'
        r'{"whitespace_pattern":"(?: {0,2}|\\r?\\n[ \\t]{0,30})","coerce_one_of":false,"lenient":false}}'
        "\n"
    )
    for job in jobs:
        assert job.sampling.grammar == written
        assert job.sampling.allowed_token_ids == (97, 98)
        assert job.sampling.bad_words == ((120,), (32, 120))
    refused = await gateway.post(COMPLETIONS, {"prompt": "x", "guided_json": {"$ref": "#/a"}})
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == ("guided_json", "invalid_grammar")
