"""Validation: every limit of the table, every field, and the same result for HTTP and gRPC."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.request_limits import Limit, ValueKind
from baton.gateway.input import field_policy
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.field_table import FieldTable, ReadField
from baton.gateway.input.ignored_fields import UnknownFields
from baton.gateway.input.request_body import ParsedRequest, parse_request
from baton.rpc.mappers.client_mapper import from_generate_request, to_generate_request
from tests.invalid_requests import (
    FIELDS,
    LISTS,
    bodies,
    body_with,
    error_over_grpc,
    fields_refused,
    invalid_json_values,
)
from tests.scale import sized
from tests.unit.gateway.validator_calls import MAX_LEN, call, refusal


def parsed(body: dict[str, Any]) -> ParsedRequest:
    return parse_request(Endpoint.COMPLETIONS, body, UnknownFields(is_strict=True))


def fields_read(table: FieldTable) -> set[str]:
    return {name for name, rule in table.items() if isinstance(rule, ReadField)}


def valid_values(name: str, limit: Limit) -> list[Any]:
    if limit.kind is ValueKind.BOOLEAN:
        return [True, False]
    if limit.kind is ValueKind.STRING:
        if name == "bad_words":  # a byte is a token here, and a word may have 64
            return ["x", "x" * 63]
        return ["demo"] if name == "model" else ["x" * int(limit.minimum or 1), "x" * int(limit.maximum or 9)]
    values: list[Any] = [limit.minimum] if limit.minimum is not None else [1e-9]
    if name in ("max_tokens", "max_completion_tokens"):
        return [1, MAX_LEN - 1]
    if name == "best_of":
        return [1]
    if name == "min_tokens":
        return [0, 5]
    if name == "n":
        return [1, 64]
    return [*values, 299 if name in ("stop_token_ids", "allowed_token_ids") else limit.maximum]


def invalid_values(limit: Limit) -> list[Any]:
    """Return values that the limit forbids, including some that JSON cannot express."""
    return [
        *invalid_json_values(limit),
        *([math.nan, math.inf, -math.inf] if limit.kind in (ValueKind.INTEGER, ValueKind.NUMBER) else []),
    ]


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_each_field_accepts_its_bounds_and_rejects_values_outside(name: str) -> None:
    for value in valid_values(name, FIELDS[name]):
        call(body_with(name, value))
    for value in invalid_values(FIELDS[name]):
        if name == "prompt" and value is True:
            value = [value]
        error = refusal(body_with(name, value))
        assert error.param.split("[")[0] in (name, "max_tokens"), (name, value, error.param)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"prompt"}))
def test_null_is_treated_as_omitted(name: str) -> None:
    body = body_with(name, None)
    if name in LISTS or name == "logit_bias":
        body[name] = None
    assert parsed(body) == parsed({key: value for key, value in body.items() if key in ("prompt", "stream")})


def test_limits_and_field_lists_name_the_same_fields() -> None:
    without_limit = field_policy.CONSTRAINTS.keys() | {"prompt_cache_options"}
    assert {name.split(".")[0] for name in FIELDS} == fields_read(field_policy.COMPLETIONS) - without_limit
    chat_only = fields_read(field_policy.CHAT) - fields_read(field_policy.COMPLETIONS)
    assert chat_only == field_policy.CHAT_TEMPLATE.keys() | {"top_logprobs"}


@pytest.mark.parametrize(
    ("endpoint", "table"),
    [(Endpoint.COMPLETIONS, field_policy.COMPLETIONS), (Endpoint.CHAT, field_policy.CHAT)],
)
def test_unimplemented_fields_are_rejected_unless_they_have_no_effect(
    endpoint: Endpoint, table: dict[str, Any]
) -> None:
    good = {"messages": [{"role": "user", "content": "x"}]} if endpoint is Endpoint.CHAT else {"prompt": "x"}
    for name, field in fields_refused(table).items():
        call(good | {name: None}, endpoint)
        for default in field.defaults:
            call(good | {name: default}, endpoint)
        error = refusal(good | {name: {"asks": "for something"}}, endpoint)
        assert (error.param, error.failure.reason) == (name, Reason.UNSUPPORTED_FIELD)
        assert field.advice in str(error)


def test_default_value_must_have_the_right_type() -> None:
    for name, value in (("logits_processors", ()), ("early_stopping", 0)):
        error = refusal({"prompt": "x", name: value})
        assert (error.param, error.failure.reason) == (name, Reason.UNSUPPORTED_FIELD)


def test_labels_have_no_effect_but_are_validated() -> None:
    labels = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    assert parsed({"prompt": "x"} | labels) == parsed({"prompt": "x"})
    for name, value in [
        ("user", 1),
        ("user", "a\0"),
        ("user", "x" * 513),
        ("store", "yes"),
        ("metadata", []),
        ("metadata", {"a": 1}),
        ("metadata", {str(i): "x" for i in range(17)}),
        ("service_tier", {}),
    ]:
        refusal({"prompt": "x", name: value})


@pytest.mark.parametrize(
    "field",
    [
        "kv_transfer_params",
        "request_id",
        "deadline_s",
        "sample_indices",
        "chat_template",
        "reader",
        "owner",
        "tenant",
    ],
)
def test_internal_fields_cannot_be_set(field: str) -> None:
    for endpoint, body in (
        (Endpoint.COMPLETIONS, {"prompt": "x"}),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        assert refusal(body | {field: "10.0.0.1:9"}, endpoint).failure.reason is Reason.UNSUPPORTED_FIELD


# HTTP and gRPC.


def answer(body: dict[str, Any], endpoint: Endpoint) -> Any:
    """Return the validated requests, or the failure."""
    try:
        return [call(body, endpoint).requests]
    except Refused as refused:
        return refused.failure


def answer_over_grpc(body: dict[str, Any]) -> Any:
    try:
        converted = from_generate_request(to_generate_request(body))
    except Refused as refused:
        return refused.failure
    return answer(converted, Endpoint.GRPC)


@settings(max_examples=sized(100, 3000), deadline=None)
@given(bodies())
def test_http_and_grpc_give_the_same_validation_result(body: dict[str, Any]) -> None:
    """Of a body with several errors, gRPC reports a list that is too long first: it is not even converted."""
    said = answer(body, Endpoint.COMPLETIONS)
    over_grpc = answer_over_grpc(body)
    if isinstance(over_grpc, Failure) and " items; at most " in over_grpc.message:
        assert (over_grpc.code, said.code) == (Code.INVALID_ARGUMENT, Code.INVALID_ARGUMENT)
    elif isinstance(said, Failure):
        has_ids = isinstance(body.get("prompt"), list)
        assert over_grpc == replace(said, message=error_over_grpc(said.message, has_ids=has_ids))
    else:
        assert over_grpc == said
    if isinstance(said, list):
        (request,) = said[0]
        assert len(request.token_ids) + request.sampling.max_tokens <= MAX_LEN
        assert math.isfinite(request.sampling.temperature)
    else:
        assert said.code is Code.INVALID_ARGUMENT


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


NAMES = sorted({*field_policy.CHAT, *field_policy.COMPLETIONS})


@settings(max_examples=sized(100, 3000), deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=5))
def test_arbitrary_body_is_parsed_or_rejected(body: dict[str, Any]) -> None:
    for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        said = answer({"prompt": "x"} | body if endpoint is Endpoint.COMPLETIONS else body, endpoint)
        if not isinstance(said, list):
            assert said.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
            said.message.encode()
