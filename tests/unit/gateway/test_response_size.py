"""Calls whose response may be too large are refused with the arithmetic, before anything is placed."""

import asyncio
import tracemalloc
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Code, Reason, Refused
from baton.gateway.input.client_call import ClientCall, Endpoint
from baton.gateway.input.response_size import bytes_per_token, call_bytes, response_bytes
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.output.builtin_formats import HERMES, THINK
from baton.gateway.output.formats import OutputFormat, ParserOptions
from baton.gateway.output.parsing import message_parser
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.runtime.process.byte_budget import Account
from tests.unit.gateway.fakes import cluster, until
from tests.unit.gateway.validator_calls import at_once, call, completion
from tests.unit.gateway.virtual import virtual

HYBRID = ("h0", "hybrid")
LARGE = {"n": 4, "max_tokens": 1000, "logprobs": 20}


@virtual
async def test_call_with_a_too_large_response_is_refused_with_the_arithmetic() -> None:
    async with cluster(HYBRID, max_response_bytes=2**20) as c:
        call = await c.call("hello", **LARGE)
        with pytest.raises(Refused) as refused:
            await c.complete("hello", **LARGE)
        failure = refused.value.failure
        assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.MEMORY_BUDGET)
        assert failure.retry_after_s is None
        assert f"{response_bytes(call):,} bytes" in failure.message
        assert f"4 choices of 1,000 tokens of about {bytes_per_token(call):,} bytes" in failure.message
        assert c.scheduler.queries == []


@virtual
async def test_streamed_response_of_any_length_is_accepted_unless_it_repeats_a_long_prompt() -> None:
    async with cluster(HYBRID, max_response_bytes=2**15) as c:
        await c.complete("hello", n=4, max_tokens=50, logprobs=20, stream=True)
        with pytest.raises(Refused, match="4 choices that repeat the prompt"):
            await c.complete("x" * 1000, n=4, max_tokens=1, stream=True, return_token_ids=True)


@virtual
async def test_request_waits_for_no_memory_and_gets_429_until_another_one_has_ended() -> None:
    async with cluster(HYBRID) as c:
        needed = call_bytes(await c.call("hello", max_tokens=1000))
    async with cluster(HYBRID, memory_limits={Account.REQUESTS: 2 * needed - 1}) as c:
        running = asyncio.create_task(c.complete("hello", max_tokens=1000))
        await until(lambda: c.gateway.budget.used(Account.REQUESTS) == needed)
        with pytest.raises(Refused, match=f"needs {needed:,} bytes") as refused:
            await c.complete("hello", max_tokens=1000)
        failure = refused.value.failure
        assert (failure.code, failure.reason, failure.retry_after_s) == (
            Code.RESOURCE_EXHAUSTED,
            Reason.MEMORY_BUDGET,
            1.0,
        )
        running.cancel()
        await asyncio.wait((running,))
        assert c.gateway.budget.used(Account.REQUESTS) == 0


def test_tools_prompt_and_grammar_of_a_chat_count() -> None:
    plain = at_once(chat_call({}))
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 10_000}}]
    assert call_bytes(at_once(chat_call({"tools": tools}))) > call_bytes(plain) + 200_000
    (request,) = plain.requests
    constrained = replace(request, sampling=replace(request.sampling, grammar="x" * 1000))
    assert call_bytes(replace(plain, requests=(constrained,))) == call_bytes(plain) + 2000


def test_lists_of_ids_logprobs_of_prompts_and_echoes_count() -> None:
    plain = call_bytes(completion())
    num_prompt_tokens = len(completion().requests[0].token_ids)
    assert call_bytes(completion(allowed_token_ids=list(range(200)))) >= plain + 200 * 36
    assert call_bytes(completion(bad_words=[f"word {n}" for n in range(100)])) >= plain + 100 * (100 + 6 * 36)
    assert call_bytes(completion(logit_bias={str(n): 1 for n in range(200)})) >= plain + 200 * 120
    assert call_bytes(completion(stop=["x" * 1000] * 16)) >= plain + 16_000
    assert call_bytes(completion(prompt_logprobs=20)) == plain + num_prompt_tokens * 21 * 8
    long = {"prompt": "x" * 80, "max_tokens": 1, "stream": True}
    echoed, streamed = (completion(prompt=[65] * 50, echo=True, logprobs=3, stream=flag) for flag in (False, True))
    assert call_bytes(streamed) >= call_bytes(echoed) + 50 * 4 * 60
    assert call_bytes(call(long | {"echo": True})) >= call_bytes(call(long)) + 3 * 80


def test_text_that_the_parser_may_hold_counts() -> None:
    """A call whose arguments come before its name is held back as a whole."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {"max_tokens": 4000, "tools": tools}
    held = call_bytes(at_once(chat_call(chat))) - call_bytes(at_once(chat_call(chat | {"tool_choice": "none"})))
    parser = message_parser(OutputFormat(tools=HERMES), ParserOptions())
    tracemalloc.start()
    try:
        for piece in ('<tool_call>{"arguments": {"a": "', *(f"{number:4}" for number in range(4000))):
            assert not parser.put(piece)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < held + 40_000  # the last pieces are not joined yet


def chat_call(fields: dict[str, Any]) -> Coroutine[Any, Any, ClientCall]:
    checker = Validator(
        tokenizer=ByteTokenizer(),
        model="demo",
        model_limits=lambda: ModelLimits(max_model_len=4096, max_num_seqs=64),
        rng=Random(3),
        request_timeout_s=60.0,
        output_format=OutputFormat(tools=HERMES, reasoning=THINK),
    )
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return checker.call(Endpoint.CHAT, body, Caller(), received_s=0.0)
