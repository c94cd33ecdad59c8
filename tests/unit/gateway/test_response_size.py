"""Calls whose response may be too large are refused with the arithmetic, before anything is placed."""

import asyncio

import pytest

from baton.core.errors import Code, Reason, Refused
from baton.gateway.input.response_size import bytes_per_token, call_bytes, response_bytes
from baton.runtime.process.byte_budget import Account
from tests.unit.gateway.fakes import cluster, until
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
        with pytest.raises(Refused, match="4 choices that repeat the prompt's token ids"):
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
