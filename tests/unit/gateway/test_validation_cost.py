"""CPU time of the event loop's own thread for large bodies."""

import asyncio
import json
import time
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.validation import Validator
from tests.unit.gateway.validator_calls import validator

LIMIT_S = 0.05


async def validate(validator: Validator, raw: bytes) -> str:
    """Parse and validate a body as the HTTP application does. Return the refusal, or an empty string."""
    try:
        await validator.call(
            Endpoint.COMPLETIONS, await parse_body(raw), Caller(), received_s=0.0, num_body_bytes=len(raw)
        )
    except Refused as refused:
        return refused.failure.message
    return ""


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"prompt": [[97] * 16_000] * 256, "max_tokens": 1}, ""),
        ({"prompt": [97] * 1_000_000, "max_tokens": 1}, ""),
        ({"prompt": [[]] * 700_000}, "objects and lists"),
    ],
    ids=["256 prompts of 16,000 ids", "a prompt of a million ids", "700,000 lists"],
)
async def test_large_body_takes_little_cpu_time_of_the_loop(body: dict[str, Any], refusal: str) -> None:
    work = asyncio.create_task(validate(validator(max_model_len=2**20), json.dumps(body).encode()))
    longest_s = 0.0
    while not work.done():
        began_s = time.thread_time()
        await asyncio.sleep(0)  # all callbacks that are ready run
        longest_s = max(longest_s, time.thread_time() - began_s)
    assert refusal in await work
    assert bool(refusal) == bool(await work)
    assert longest_s < LIMIT_S
