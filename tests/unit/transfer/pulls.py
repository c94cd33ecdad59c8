"""Helpers that run pulls in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

from baton.core.errors import Failure, Reason, Refused
from baton.sim import virtual_time
from tests.unit.transfer.transfer_rig import OWNER, Rig

ENDLESS_S = 300.0


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in virtual time. A wait that would never end fails the test."""

    async def bounded(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(ENDLESS_S):
            await test(*args, **kwargs)

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(bounded(*args, **kwargs))

    return run


async def refusal_of(waiting: Awaitable[object]) -> Failure:
    with pytest.raises(Refused) as refused:
        await waiting
    return refused.value.failure


async def failure_of(waiting: Awaitable[object]) -> Reason:
    return (await refusal_of(waiting)).reason


async def pull_all(r: Rig, text: str = "a", num_tokens: int = 18, request: int = 0) -> None:
    job, _blocks = r.prefill(text, num_tokens, request)
    pull = r.kv_reader.pull(OWNER, job, have_blocks=0)
    await pull.first_ready()
    receiving = r.mark_received(pull, -(-num_tokens // 4))
    result = await pull.done()
    assert result.num_blocks == len(receiving)
    assert [r.reader.contents[receiving[i]] for i in range(len(receiving))] == [
        f"{text}:{i}" for i in range(len(receiving))
    ]
    r.release(receiving)
