"""CPU time of the event loop's own thread for large bodies."""

import json
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.strict_json import parse_body
from baton.gateway.input.validation import Validator
from tests.loop_cpu import repeated_longest_turn_s
from tests.unit.gateway.validator_calls import validator

pytestmark = pytest.mark.slow

LIMIT_S = 0.05


async def validate(validator: Validator, raw: bytes) -> str:
    """Parse and validate a body as the HTTP application does. Return the refusal, or an empty string."""
    try:
        await validator.call(Endpoint.COMPLETIONS, await parse_body(raw), Caller(), received_s=0.0, in_thread=True)
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
