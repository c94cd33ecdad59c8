"""The one validator: every limit of the table, every field by name, and the same answer through both doors."""

import math
from array import array
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import Code, Reason, Refused
from baton.core.front import Caller
from baton.core.limits import Kind, Limit
from baton.core.request import Slo
from baton.gateway import fields
from baton.gateway.bodies import draft_of
from baton.gateway.call import Call, Endpoint, InvalidField
from baton.gateway.tokenizer import ByteTokenizer
from baton.gateway.validation import ModelFacts, Validator
from baton.wire.convert_front import from_generate_request, to_generate_request
from tests.corpus import FIELDS, LISTS, beyond, bodies, body_with
from tests.scale import sized

MAX_LEN = 100


def validator(**facts: Any) -> Validator:
    known = ModelFacts(**({"max_model_len": MAX_LEN, "max_num_seqs": 64} | facts))
    return Validator(tokenizer=ByteTokenizer(vocab_size=300), model="demo", facts=lambda: known, rng=Random(3), request_timeout_s=60.0)


def at_once(work: Coroutine[Any, Any, Call]) -> Call:
    """Its result; with a tokenizer that has no thread, nothing waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def call(body: dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS, **facts: Any) -> Call:
    return at_once(validator(**facts).call(endpoint, body, Caller(), received_s=10.0))


def completion(**body: Any) -> Call:
    return call({"prompt": "x"} | body)


def chat(**body: Any) -> Call:
    return call({"messages": [{"role": "user", "content": "hi"}]} | body, Endpoint.CHAT)


def refusal(body: dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS) -> InvalidField:
    with pytest.raises(InvalidField) as refused:
        call(body, endpoint)
    assert refused.value.failure.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
    assert not refused.value.failure.retriable
    str(refused.value).encode()  # can be sent
    assert len(str(refused.value)) < 400
    return refused.value


def valid_values(name: str, limit: Limit) -> list[Any]:
    if limit.kind is Kind.BOOLEAN:
        return [True, False]
    if limit.kind is Kind.STRING:
        return ["demo"] if name == "model" else ["x" * int(limit.minimum or 1)]
    values: list[Any] = [limit.minimum] if limit.minimum is not None else [1e-9]
    if name in ("max_tokens", "max_completion_tokens"):
        return [1, MAX_LEN - 1]
    if name == "min_tokens":
        return [0, 5]
    if name == "n":
        return [1, 64]
    return [*values, 299 if name == "stop_token_ids" else limit.maximum]


def invalid_values(limit: Limit) -> list[Any]:
    """Also those that JSON has no word for."""
    return [*beyond(limit), *([math.nan, math.inf, -math.inf] if limit.kind in (Kind.INTEGER, Kind.NUMBER) else [])]


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_each_field_takes_its_bounds_and_refuses_what_lies_beyond(name: str) -> None:
    for value in valid_values(name, FIELDS[name]):
        call(body_with(name, value))
    for value in invalid_values(FIELDS[name]):
        if name == "prompt" and value is True:
            value = [value]
        error = refusal(body_with(name, value))
        assert error.param.split("[")[0] in (name, "max_tokens"), (name, value, error.param)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"prompt"}))
def test_null_is_as_good_as_left_out(name: str) -> None:
    body = body_with(name, None)
    if name in LISTS or name == "logit_bias":
        body[name] = None
    assert draft_of(Endpoint.COMPLETIONS, body) == draft_of(
        Endpoint.COMPLETIONS, {key: value for key, value in body.items() if key in ("prompt", "stream")}
    )


def test_the_table_and_the_fields_name_the_same_things() -> None:
    assert {name.split(".")[0] for name in FIELDS} == fields.COMPLETIONS
    assert {"messages", "top_logprobs"} == fields.CHAT - fields.COMPLETIONS
    for refused in (fields.NOT_IN_CHAT, fields.NOT_IN_COMPLETIONS):
        assert not refused.keys() & fields.LABELS
    assert not fields.NOT_IN_COMPLETIONS.keys() & fields.COMPLETIONS
    assert not fields.NOT_IN_CHAT.keys() & fields.CHAT


@pytest.mark.parametrize(("endpoint", "table"), [(Endpoint.COMPLETIONS, fields.NOT_IN_COMPLETIONS), (Endpoint.CHAT, fields.NOT_IN_CHAT)])
def test_unimplemented_fields_are_refused_by_name_unless_they_ask_for_nothing(endpoint: Endpoint, table: dict[str, Any]) -> None:
    good = {"messages": [{"role": "user", "content": "x"}]} if endpoint is Endpoint.CHAT else {"prompt": "x"}
    for name, field in table.items():
        call(good | {name: None}, endpoint)
        for default in field.defaults:
            call(good | {name: default}, endpoint)
        error = refusal(good | {name: {"asks": "for something"}}, endpoint)
        assert (error.param, error.failure.reason) == (name, Reason.UNSUPPORTED_FIELD)
        assert field.advice in str(error)


def test_a_default_is_recognised_by_its_type_too() -> None:
    refusal({"prompt": "x", "echo": 0})
    refusal({"prompt": "x", "best_of": True})


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [("temprature", 1, "temperature"), ("maxtokens", 1, "max_tokens"), ("Model", "demo", "model"), ("tool", [], None)],
)
def test_unknown_fields_are_refused_with_the_nearest_name(name: str, value: Any, meant: str | None) -> None:
    error = refusal({"prompt": "x", name: value})
    assert error.failure.reason is Reason.UNSUPPORTED_FIELD
    assert repr(name) in str(error)
    assert meant is None or f"did you mean {meant}?" in str(error)


def test_unknown_names_are_shown_as_ascii() -> None:
    assert "\\u" in str(refusal({"prompt": "x", "t\u00e9mp\u20ac": 1}))
    refusal({"prompt": "x", "k" * 100_000: 1})
    refusal({"prompt": "x", "\ud800": 1})


def test_labels_change_nothing_but_must_be_sound() -> None:
    labels = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    assert draft_of(Endpoint.COMPLETIONS, {"prompt": "x"} | labels) == draft_of(Endpoint.COMPLETIONS, {"prompt": "x"})
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
    ["kv_transfer_params", "cache_salt", "request_id", "deadline_s", "sample_indices", "chat_template", "reader", "owner", "tenant"],
)
def test_internal_fields_cannot_be_set(field: str) -> None:
    for endpoint, body in ((Endpoint.COMPLETIONS, {"prompt": "x"}), (Endpoint.CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        assert refusal(body | {field: "10.0.0.1:9"}, endpoint).failure.reason is Reason.UNSUPPORTED_FIELD


# Prompts.


def test_prompts_of_every_form() -> None:
    assert [list(r.token_ids) for r in completion(prompt="ab").requests] == [[97, 98]]
    assert [list(r.token_ids) for r in completion(prompt=["a", "b"]).requests] == [[97], [98]]
    assert [list(r.token_ids) for r in completion(prompt=[1, 2]).requests] == [[1, 2]]
    assert [list(r.token_ids) for r in completion(prompt=[[1], [2, 3]]).requests] == [[1], [2, 3]]
    assert isinstance(completion(prompt=[1]).requests[0].token_ids, array)


@pytest.mark.parametrize(
    "prompt",
    [None, 1, True, {}, "", [], [""], ["a", ""], [[]], [[1], []], ["a", [1]], [[1], "a"], [[1], 2], [1, "a"], [1, True], [1, 1.0],
     [1, None], [-1], [2**32], [300], [[1], [300]], [["a"]], [[[1]]], ["x"] * 257, "a\0", "\ud800"],
)  # fmt: skip
def test_prompts_that_are_none(prompt: Any) -> None:
    assert refusal({"prompt": prompt}).param == "prompt"


def test_no_prompt_at_all() -> None:
    assert refusal({}).param == "prompt"
    assert refusal({}, Endpoint.CHAT).param == "messages"


def test_ids_are_drawn_and_differ() -> None:
    made = completion(prompt=["a", "b", "c"])
    ids = [request.request_id for request in made.requests]
    assert len(set(ids)) == 3
    assert {len(id_) for id_ in ids} == {16}
    assert made.request_id == ids[0]
    given_id = at_once(validator().call(Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}, Caller(), received_s=0, request_id=b"x" * 16))
    assert given_id.request_id == b"x" * 16 != given_id.requests[1].request_id


def test_the_seed_is_the_clients_or_drawn() -> None:
    assert completion(seed=5).requests[0].sampling.seed == 5
    assert completion(seed=-1).requests[0].sampling.seed == 2**64 - 1
    drawn = completion(prompt=["a", "b"])
    assert drawn.requests[0].sampling.seed != drawn.requests[1].sampling.seed


@pytest.mark.parametrize(
    "messages",
    [
        None, [], "hi", {}, [1], ["hi"], [{}], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "user", "content": 1}],
        [{"role": "user", "content": []}], [{"role": "robot", "content": "x"}], [{"role": "tool", "content": "x"}], [{"content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": "a\0"}], [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "x", "colour": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}], [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}],
        [{"role": "user", "content": [1]}], [{"role": "user", "content": "x", "name": 5}], [{"role": "user", "content": "x"}] * 4097,
    ],
)  # fmt: skip
def test_messages_that_are_none(messages: Any) -> None:
    assert refusal({"messages": messages}, Endpoint.CHAT).param.startswith("messages")


def test_messages_become_a_prompt() -> None:
    made = call(
        {
            "messages": [
                {"role": "developer", "content": "be brief", "name": None},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "bob"},
                {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": None},
            ]
        },
        Endpoint.CHAT,
    )
    assert bytes(list(made.requests[0].token_ids)) == b"system: be brief\nuser: a\nb\nassistant: \nassistant: "


# Lengths.


def test_prompt_and_answer_must_fit_the_model() -> None:
    assert completion(prompt="x" * 90, max_tokens=10).requests[0].sampling.max_tokens == 10
    error = refusal({"prompt": "x" * 90, "max_tokens": 11})
    assert error.failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert "90" in str(error)
    assert "11" in str(error)
    assert "100" in str(error)
    assert refusal({"prompt": "x" * 100}).failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert refusal({"prompt": [1] * 101}).failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert refusal({"prompt": "x" * 90, "min_tokens": 11}).failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_default_lengths() -> None:
    assert completion().requests[0].sampling.max_tokens == 16
    assert completion(prompt="x" * 90).requests[0].sampling.max_tokens == 10
    assert completion(min_tokens=20).requests[0].sampling.max_tokens == 20
    assert chat().requests[0].sampling.max_tokens == MAX_LEN - len(b"user: hi\nassistant: ")
    assert call({"prompt": "x"}, max_model_len=None).requests[0].sampling.max_tokens == 16
    assert completion(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
    assert completion(max_completion_tokens=3, max_tokens=3).requests[0].sampling.max_tokens == 3
    assert refusal({"prompt": "x", "max_completion_tokens": 3, "max_tokens": 4}).param == "max_tokens"
    assert refusal({"prompt": "x", "min_tokens": 5, "max_tokens": 4}).param == "min_tokens"


def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    class NeverEncodes(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            raise AssertionError("encoded")

    checked = Validator(
        tokenizer=NeverEncodes(), model="demo", facts=lambda: ModelFacts(max_model_len=9, max_num_seqs=1), rng=Random(), request_timeout_s=1
    )
    with pytest.raises(InvalidField, match="at least 5000000"):
        at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x" * 5_000_000}, Caller(), received_s=0))


@pytest.mark.parametrize("body", [{"prompt": "x" * 5_000_000}, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}])
def test_a_text_whose_beginning_is_too_long_is_not_encoded_whole(body: dict[str, Any]) -> None:
    encoded: list[int] = []

    class Counts(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            encoded.append(len(text))
            return await super().encode(text, add_special_tokens=add_special_tokens)

        def min_tokens_of(self, num_bytes: int) -> int:
            return 0  # as where text may shrink before it is cut into tokens

    checked = Validator(
        tokenizer=Counts(), model="demo", facts=lambda: ModelFacts(max_model_len=100, max_num_seqs=1), rng=Random(), request_timeout_s=1
    )
    with pytest.raises(InvalidField, match="at least 736 tokens and max_tokens is 1, together more than the model's 100"):
        at_once(checked.call(Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS, body, Caller(), received_s=0))
    assert encoded == [800]


def test_a_long_text_of_long_tokens_may_fit() -> None:
    class Halves(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
            return await super().encode(text[: len(text) // 20])

        def min_tokens_of(self, num_bytes: int) -> int:
            return 0

    checked = Validator(
        tokenizer=Halves(), model="demo", facts=lambda: ModelFacts(max_model_len=100, max_num_seqs=1), rng=Random(), request_timeout_s=1
    )
    made = at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x" * 1000}, Caller(), received_s=0))
    assert made.requests[0].num_prompt_tokens == 50


def test_choices_are_bounded() -> None:
    assert len(completion(prompt=["x"] * 16, n=64).requests) == 16
    assert refusal({"prompt": ["x"] * 17, "n": 64}).param == "n"
    assert refusal({"prompt": "x", "n": 65}).param == "n"  # what one worker runs
    call({"prompt": "x", "n": 65}, max_num_seqs=None)


# Single fields.


def test_models() -> None:
    assert completion(model="demo").model == "demo"
    error = refusal({"prompt": "x", "model": "gpt-4"})
    assert (error.failure.code, error.failure.reason, error.param) == (Code.NOT_FOUND, Reason.MODEL_NOT_FOUND, "model")


def test_sampling_as_openai_and_vllm_have_it() -> None:
    sampling = completion(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, seed=7, logprobs=3,
        logit_bias={"5": 1, "4": -100}, stop_token_ids=[1, 2], min_tokens=2, ignore_eos=True, stop="end",
    ).requests[0].sampling  # fmt: skip
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (sampling.num_logprobs, sampling.logit_bias, sampling.stop_token_ids) == (3, ((4, -100.0), (5, 1.0)), (1, 2))
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert all(type(getattr(sampling, name)) is float for name in ("temperature", "presence_penalty", "repetition_penalty"))
    assert completion(stop="end").shape.stop == ("end",)
    assert completion(stop=["a", "b"]).shape.stop == ("a", "b")
    assert completion(stop=[]).shape.stop == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["x"] * 17),
        ("stop", 5),
        ("stop", [""]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [300]),
        ("stop_token_ids", [1] * 129),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("slo", 5),
        ("slo", {"ttft": 5}),
        ("slo", {"ttft_ms": 0}),
        ("stream_options", {"include_usage": True}),
        ("stream", "yes"),
    ],
)
def test_values_that_are_none(name: str, value: Any) -> None:
    assert refusal({"prompt": "x", name: value}).param.startswith(name)


def test_logprobs_of_the_two_apis() -> None:
    assert completion().num_logprobs is None
    assert completion(logprobs=0).num_logprobs == 0
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert chat(logprobs=False).num_logprobs is None
    chat_body = {"messages": [{"role": "user", "content": "x"}]}
    assert refusal(chat_body | {"top_logprobs": 3}, Endpoint.CHAT).param == "top_logprobs"
    assert refusal(chat_body | {"logprobs": 3}, Endpoint.CHAT).param == "logprobs"
    assert refusal(chat_body | {"logprobs": True, "top_logprobs": 21}, Endpoint.CHAT).param == "top_logprobs"
    assert refusal({"prompt": "x", "logprobs": True}).param == "logprobs"


def test_stream_options() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).shape.include_usage
    assert not completion(stream=True, stream_options={}).shape.include_usage
    completion(stream=True, stream_options={"include_obfuscation": False, "continuous_usage_stats": None})
    for options in ({"include_obfuscation": True}, {"colour": 1}, [], {"include_usage": 1}):
        refusal({"prompt": "x", "stream": True, "stream_options": options})


def test_priority_slo_and_deadline() -> None:
    made = completion(priority=-3, slo={"ttft_ms": 250, "tpot_ms": None})
    assert (made.requests[0].priority, made.requests[0].slo) == (-3, Slo(ttft_s=0.25))
    assert made.requests[0].deadline_s == 70.0
    limited = at_once(validator().call(Endpoint.COMPLETIONS, {"prompt": "x"}, Caller(timeout_s=2.5), received_s=10.0))
    assert limited.requests[0].deadline_s == 12.5


def test_a_trace_context_is_kept_if_it_is_one() -> None:
    def traced(text: str) -> str:
        made = at_once(validator().call(Endpoint.COMPLETIONS, {"prompt": "x"}, Caller(trace_context=text), received_s=0))
        return made.requests[0].trace_context

    good = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert traced(good) == good
    assert traced(good + "\r\nx: y") == traced("x" * 100_000) == ""


# Both doors.


def answer(body: dict[str, Any], endpoint: Endpoint) -> Any:
    """What a door says: the requests, or why not."""
    try:
        return [call(body, endpoint).requests]
    except Refused as refused:
        return refused.failure


@settings(max_examples=sized(100, 3000), deadline=None)
@given(bodies())
def test_http_and_grpc_give_the_same_answer(body: dict[str, Any]) -> None:
    over_grpc = from_generate_request(to_generate_request(body))
    said = answer(body, Endpoint.COMPLETIONS)
    assert answer(over_grpc, Endpoint.GRPC) == said
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


NAMES = sorted(fields.CHAT | fields.COMPLETIONS | fields.LABELS | {"metadata", "store"})


@settings(max_examples=sized(100, 3000), deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=5))
def test_anything_at_all_is_a_request_or_refused(body: dict[str, Any]) -> None:
    for endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT):
        said = answer({"prompt": "x"} | body if endpoint is Endpoint.COMPLETIONS else body, endpoint)
        if not isinstance(said, list):
            assert said.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
            said.message.encode()


def test_who_asks_for_no_slo_gets_the_clusters_term_by_term() -> None:
    checked = Validator(
        tokenizer=ByteTokenizer(vocab_size=300),
        model="demo",
        facts=lambda: ModelFacts(max_model_len=MAX_LEN, max_num_seqs=64),
        rng=Random(3),
        request_timeout_s=60.0,
        default_slo=Slo(ttft_s=0.5, tpot_s=0.05),
    )

    def slo_of(**body: Any) -> Slo:
        return at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x"} | body, Caller(), received_s=0.0)).requests[0].slo

    assert slo_of() == Slo(ttft_s=0.5, tpot_s=0.05)
    assert slo_of(slo={"ttft_ms": 100}) == Slo(ttft_s=0.1, tpot_s=0.05)
