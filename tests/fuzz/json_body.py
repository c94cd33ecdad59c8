"""Fuzz target: JSON bodies of all routes. Each is refused with a typed error, or means what JSON says.

The first byte of an input chooses the route.
"""

import json
from array import array
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any

from baton.core.errors import Refused
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.ignored_fields import MAX_NAME_CHARS, MAX_NAMES, UnknownFields
from baton.gateway.input.request_body import parse_request
from baton.gateway.input.strict_json import parse_object
from baton.gateway.input.tokenize_calls import detokenize_body, tokenize_body
from baton.gateway.input.translations.json_echo import encode_echo
from baton.gateway.input.translations.messages_body import translate_count, translate_messages
from baton.gateway.input.translations.responses_body import translate_responses
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.text.tokenizer import ByteTokenizer

_VALIDATOR = Validator(
    tokenizer=ByteTokenizer(),
    model="demo",
    model_limits=lambda: ModelLimits(max_model_len=4096, max_num_seqs=16),
    rng=Random(1),
    request_timeout_s=60.0,
)


def run_one(data: bytes) -> None:
    route, content = data[:1] or b"\0", data[1:]
    try:
        body = parse_object(content)
    except Refused:
        return
    assert _same(body, json.loads(content))
    try:
        _read(route[0] % 7, body)
    except Refused as refused:
        str(refused).encode()


def _read(route: int, body: dict[str, Any]) -> None:
    unknown = UnknownFields()
    if route == 0:
        parse_request(Endpoint.COMPLETIONS, body, unknown)
    elif route == 1:
        parse_request(Endpoint.CHAT, body, unknown)
    elif route >= 4:
        translated = (translate_responses, translate_messages, translate_count)[route - 4](body, unknown)
        json.loads(b"{" + encode_echo(translated.echo) + b"}")
        with translated.in_errors():
            if route == 6:
                _run(tokenize_body(_VALIDATOR, translated.chat, unknown, size=0))
            else:
                parse_request((Endpoint.RESPONSES, Endpoint.MESSAGES)[route - 4], translated.chat, unknown)
    else:
        _run(
            tokenize_body(_VALIDATOR, body, unknown, size=0)
            if route == 2
            else detokenize_body(_VALIDATOR, body, unknown)
        )
    assert len(unknown.names) <= MAX_NAMES
    assert all(name.isascii() and name.isprintable() and len(name) <= MAX_NAME_CHARS for name in unknown.names)


def _run(work: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that only yields to the event loop."""
    with suppress(StopIteration):
        while True:
            work.send(None)


def _same(value: object, expected: object) -> bool:
    """Compare a body with the result of `json.loads`. An array equals the list of its items."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    if isinstance(value, array) and isinstance(expected, list):
        return value.tolist() == expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    return type(value) is type(expected) and value == expected
