"""Unknown fields: ignored and named within bounds, or refused with a similar name."""

from typing import Any

import pytest

from baton.core.errors import Reason
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.ignored_fields import (
    MAX_FIELDS,
    MAX_KNOWN_NAMES,
    MAX_NAME_CHARS,
    MAX_NAMES,
    OTHER,
    IgnoredFieldNames,
)
from tests.unit.gateway.validator_calls import chat, completion, refusal


def test_unknown_fields_of_every_object_are_ignored_and_named_once() -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "hi", "index": 0}], "weight": 1}
    ignored = chat(
        messages=[user, user], colour="red", stream=True, stream_options={"every": 1}, slo={"ttft": 5}
    ).ignored_fields
    assert sorted(ignored) == [
        "colour",
        "messages[].content[].index",
        "messages[].weight",
        "slo.ttft",
        "stream_options.every",
    ]
    assert chat().ignored_fields == ()


def test_names_in_a_response_are_bounded_printable_and_unambiguous() -> None:
    hostile = ["a, b\r\nx-evil: 1", "t\u00e9mp\u20ac", "\ud800", "k" * 100_000, "50%"]
    names = completion(**dict.fromkeys(hostile)).ignored_fields
    assert names == (
        "a%2C%20b%0D%0Ax-evil:%201",
        "t%C3%A9mp%E2%82%AC",
        "%3F",
        "k" * MAX_NAME_CHARS,
        "50%25",
    )
    many = completion(**{f"name{i}": i for i in range(1000)}, **{"\u20ac" * 64: 1}).ignored_fields
    assert len(many) == MAX_NAMES
    assert all(len(name) <= MAX_NAME_CHARS for name in completion(**{"\u20ac" * 64: 1}).ignored_fields)


def test_number_of_different_unknown_fields_is_bounded() -> None:
    many = {f"name{i}": i for i in range(MAX_FIELDS)}
    user = {"role": "user", "content": "x"}
    assert len(chat(messages=[user | {"weight": 1}] * 5, **dict(list(many.items())[1:])).ignored_fields) == MAX_NAMES
    error = refusal({"messages": [user | many, user | {"weight": 1}]}, Endpoint.CHAT, max_model_len=1_000_000)
    assert (error.param, error.failure.reason) == ("messages[1].weight", Reason.UNSUPPORTED_FIELD)
    assert str(error) == ("the request has more than 1,024 unknown fields, such as 'messages[1].weight'; remove them")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temprature": 1}, "did you mean temperature?"),
        ({"maxtokens": 1}, "did you mean max_tokens?"),
        ({"Model": "demo"}, "did you mean model?"),
        ({"slo": {"ttft": 5}}, "unknown field 'slo.ttft'; did you mean slo.ttft_ms?"),
        ({"t\u00e9mp\u20ac": 1}, "\\u20ac"),
        ({"\ud800": 1}, "remove it"),
        ({"k" * 100_000: 1}, "remove it"),
    ],
)
def test_strict_fields_refuses_unknown_fields(body: dict[str, Any], words: str) -> None:
    error = refusal({"prompt": "x"} | body, strict_fields=True)
    assert error.failure.reason is Reason.UNSUPPORTED_FIELD
    assert words in str(error)


def test_fields_that_change_the_answer_are_refused_without_strict_fields() -> None:
    for name in ("suffix", "ebnf", "kv_transfer_params", "bootstrap_host", "tenant"):
        assert refusal({"prompt": "x", name: "y"}).failure.reason is Reason.UNSUPPORTED_FIELD


def test_a_process_logs_each_name_once_and_few_names() -> None:
    logged: list[str] = []
    names = IgnoredFieldNames(logged.append)
    assert [names.label("a"), names.label("a")] == ["a", "a"]
    assert [names.label(f"n{i}") for i in range(500)][MAX_KNOWN_NAMES:] == [OTHER] * (500 - MAX_KNOWN_NAMES)
    assert logged[0] == "a"
    assert len(logged) == MAX_KNOWN_NAMES
