"""CPU time of the event loop's own thread for large bodies."""

import json
from random import Random
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.output.builtin_formats import HERMES
from baton.gateway.output.formats import OutputFormat
from tests.loop_cpu import repeated_longest_turn_s
from tests.scripted_chats import chat_tokenizer
from tests.unit.gateway.validator_calls import validator

pytestmark = pytest.mark.slow

LIMIT_S = 0.05


async def validate(validator: Validator, raw: bytes, endpoint: Endpoint = Endpoint.COMPLETIONS) -> str:
    """Parse and validate a body as the HTTP application does. Return the refusal, or an empty string."""
    try:
        await validator.call(endpoint, await parse_body(raw), Caller(), received_s=0.0, size=len(raw))
    except Refused as refused:
        return refused.failure.message
    return ""


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"prompt": [[97] * 16_000] * 256, "max_tokens": 1}, ""),
        ({"prompt": [97] * 1_000_000, "max_tokens": 1}, ""),
        ({"prompt": ["ab " * 5000] * 256, "max_tokens": 1}, ""),
        ({"prompt": [[]] * 700_000}, "objects and lists"),
        ({"prompt": "x", "stop": ["ab"] * 700_000}, "262144 strings and numbers"),
    ],
    ids=["256 prompts of 16,000 ids", "a prompt of a million ids", "256 texts", "700,000 lists", "700,000 strings"],
)
async def test_large_body_takes_little_cpu_time_of_the_loop(body: dict[str, Any], refusal: str) -> None:
    raw, checker = json.dumps(body).encode(), validator(max_model_len=2**20)
    longest_s, refused = await repeated_longest_turn_s(lambda: validate(checker, raw), LIMIT_S)
    assert refusal in refused
    assert bool(refusal) == bool(refused)
    assert longest_s < LIMIT_S


USER = {"role": "user", "content": "x"}

CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


def tool(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", **fields}}


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}},
        {"guided_json": json.dumps({"anyOf": [{"const": n} for n in range(1500)]})},
        {"guided_grammar": "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(3900)) + 'r3900 ::= "a"'},
        {"guided_grammar": f"root ::= {'(' * 60}{' '.join(['[a-z]'] * 600)}{')' * 60}"},
        {"guided_regex": "a" * 16_000},
        {"guided_choice": [f"choice {n} of some length" for n in range(1024)]},
        {"bad_words": ["word " * 3 + str(n) for n in range(500)]},
    ],
    ids=["schema", "schema in a string", "chain of rules", "deep rule", "regex", "choice", "bad words"],
)
async def test_large_constraint_takes_little_cpu_time_of_the_loop(body: dict[str, Any]) -> None:
    raw, checker = json.dumps({"messages": [USER]} | body).encode(), chat_validator()
    longest_s, refused = await repeated_longest_turn_s(lambda: validate(checker, raw, Endpoint.CHAT), LIMIT_S)
    assert refused == ""
    assert longest_s < LIMIT_S


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"messages": [USER], "tools": [tool(number) for number in range(10_000)]}, "at most 128"),
        ({"messages": [USER], "tools": [tool(0, description="x" * 8_000_000)]}, "262,144 characters"),
        (
            {"messages": [USER, CALL, {"role": "tool", "tool_call_id": "c", "content": "x" * 8_000_000}]},
            "prompt is too long",
        ),
        (
            {
                "messages": [USER],
                "tool_choice": "required",
                "tools": [
                    tool(n, parameters={"type": "object", "properties": {f"p{i}": {"enum": ["a"]} for i in range(40)}})
                    for n in range(120)
                ],
            },
            "",
        ),
    ],
    ids=["10,000 tools", "a tool of 8 MB", "a result of 8 MB", "a large grammar"],
)
async def test_large_chat_takes_little_cpu_time_of_the_loop(body: dict[str, Any], refusal: str) -> None:
    raw, checker = json.dumps(body).encode(), chat_validator()
    longest_s, refused = await repeated_longest_turn_s(lambda: validate(checker, raw, Endpoint.CHAT), LIMIT_S)
    assert refusal in refused
    assert bool(refusal) == bool(refused)
    assert longest_s < LIMIT_S


def chat_validator() -> Validator:
    """Return a validator of a model with a chat template and tools."""
    limits = ModelLimits(max_model_len=2**17, max_num_seqs=64)
    return Validator(
        tokenizer=chat_tokenizer("qwen3"),
        model="demo",
        model_limits=lambda: limits,
        rng=Random(3),
        request_timeout_s=60.0,
        output_format=OutputFormat(tools=HERMES),
    )


async def test_ids_are_checked_once_for_all_prompts() -> None:
    checked: list[str] = []

    class CountingValidator(Validator):
        def check_vocabulary(self, name: str, token_id: int) -> None:
            checked.append(name)
            super().check_vocabulary(name, token_id)

    known = ModelLimits(max_model_len=100, max_num_seqs=64)
    checker = CountingValidator(
        tokenizer=chat_tokenizer("qwen3"),
        model="demo",
        model_limits=lambda: known,
        rng=Random(3),
        request_timeout_s=60.0,
    )
    body = {"prompt": ["x"] * 256, "max_tokens": 1, "allowed_token_ids": [*range(256)], "logit_bias": {"1": 1}}
    assert await validate(checker, json.dumps(body).encode()) == ""
    assert sorted(checked) == ["allowed_token_ids"] * 256 + ["logit_bias"]
