"""A validator for tests, and its result or error for a body."""

from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Code
from baton.gateway.input.client_call import ClientCall, Endpoint, InvalidField
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.text.tokenizer import ByteTokenizer

MAX_LEN = 100


def validator(*, strict_fields: bool = False, **model_limits: Any) -> Validator:
    known = ModelLimits(**({"max_model_len": MAX_LEN, "max_num_seqs": 64} | model_limits))
    return Validator(
        tokenizer=ByteTokenizer(vocab_size=300),
        model="demo",
        model_limits=lambda: known,
        rng=Random(3),
        request_timeout_s=60.0,
        strict_fields=strict_fields,
    )


def at_once(work: Coroutine[Any, Any, ClientCall]) -> ClientCall:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


def call(body: dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS, **model_limits: Any) -> ClientCall:
    return at_once(validator(**model_limits).call(endpoint, body, Caller(), received_s=10.0))


def completion(**body: Any) -> ClientCall:
    return call({"prompt": "x"} | body)


def chat(**body: Any) -> ClientCall:
    return call({"messages": [{"role": "user", "content": "hi"}]} | body, Endpoint.CHAT)


def refusal(body: dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS, **options: Any) -> InvalidField:
    with pytest.raises(InvalidField) as refused:
        call(body, endpoint, **options)
    assert refused.value.failure.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
    assert not refused.value.failure.retriable
    str(refused.value).encode()  # must be valid UTF-8
    assert len(str(refused.value)) < 400
    return refused.value
