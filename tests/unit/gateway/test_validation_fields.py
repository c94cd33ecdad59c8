"""Validation of single fields: parsed values, accepted values and defaults."""

from random import Random
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Code, Reason
from baton.core.request import Slo
from baton.gateway.input.client_call import Endpoint
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.text.tokenizer import ByteTokenizer
from tests.unit.gateway.validator_calls import MAX_LEN, at_once, chat, completion, refusal, validator


def test_model_name_is_validated() -> None:
    assert completion(model="demo").model == "demo"
    error = refusal({"prompt": "x", "model": "gpt-4"})
    assert (error.failure.code, error.failure.reason, error.param) == (Code.NOT_FOUND, Reason.MODEL_NOT_FOUND, "model")


def test_sampling_fields_of_openai_and_vllm_are_parsed() -> None:
    sampling = (
        completion(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.1,
            seed=7,
            logprobs=3,
            logit_bias={"5": 1, "4": -100},
            stop_token_ids=[1, 2],
            min_tokens=2,
            ignore_eos=True,
            stop="end",
        )
        .requests[0]
        .sampling
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (sampling.num_logprobs, sampling.logit_bias, sampling.stop_token_ids) == (3, ((4, -100.0), (5, 1.0)), (1, 2))
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert all(
        type(getattr(sampling, name)) is float for name in ("temperature", "presence_penalty", "repetition_penalty")
    )
    assert completion(stop="end").output_options.stop == ("end",)
    assert completion(stop=["a", "b"]).output_options.stop == ("a", "b")
    assert completion(stop=[]).output_options.stop == ()


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
        ("slo", {"ttft_ms": 0}),
        ("stream_options", {"include_usage": True}),
        ("stream", "yes"),
    ],
)
def test_invalid_values_are_rejected(name: str, value: Any) -> None:
    assert refusal({"prompt": "x", name: value}).param.startswith(name)


def test_logprobs_of_chat_and_completions_are_parsed() -> None:
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


def test_stream_options_are_parsed() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).output_options.include_usage
    assert not completion(stream=True, stream_options={}).output_options.include_usage
    completion(stream=True, stream_options={"include_obfuscation": False, "continuous_usage_stats": None})
    for options in ({"include_obfuscation": True}, [], {"include_usage": 1}):
        refusal({"prompt": "x", "stream": True, "stream_options": options})


def test_priority_slo_and_deadline_are_parsed() -> None:
    validated = completion(priority=-3, slo={"ttft_ms": 250, "tpot_ms": None})
    assert (validated.requests[0].priority, validated.requests[0].slo) == (-3, Slo(ttft_s=0.25))
    assert validated.requests[0].deadline_s == 70.0
    limited = at_once(validator().call(Endpoint.COMPLETIONS, {"prompt": "x"}, Caller(timeout_s=2.5), received_s=10.0))
    assert limited.requests[0].deadline_s == 12.5


def test_only_a_valid_trace_context_is_kept() -> None:
    def traced(text: str) -> str:
        validated = at_once(
            validator().call(Endpoint.COMPLETIONS, {"prompt": "x"}, Caller(trace_context=text), received_s=0)
        )
        return validated.requests[0].trace_context

    good = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert traced(good) == good
    assert traced(good + "\r\nx: y") == traced("x" * 100_000) == ""


def test_unset_slo_terms_take_the_default() -> None:
    checked = Validator(
        tokenizer=ByteTokenizer(vocab_size=300),
        model="demo",
        model_limits=lambda: ModelLimits(max_model_len=MAX_LEN, max_num_seqs=64),
        rng=Random(3),
        request_timeout_s=60.0,
        default_slo=Slo(ttft_s=0.5, tpot_s=0.05),
    )

    def slo_of(**body: Any) -> Slo:
        return (
            at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x"} | body, Caller(), received_s=0.0))
            .requests[0]
            .slo
        )

    assert slo_of() == Slo(ttft_s=0.5, tpot_s=0.05)
    assert slo_of(slo={"ttft_ms": 100}) == Slo(ttft_s=0.1, tpot_s=0.05)
