"""Hypothesis strategies for requests that the documentation allows, at every extreme that it names."""

import json
import math
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from baton.core.request_limits import LIMITS, Limit, ValueKind
from baton.gateway.input.field_policy import LABELS
from baton.rpc.mappers.client_mapper import to_generate_request
from baton.v1 import admin_pb2, inference_pb2
from tests.integration.gateway.cost_fuzz.cost_case import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
    CostCase,
)
from tests.integration.gateway.cost_fuzz.instant_cluster import MAX_MODEL_LEN, MAX_NUM_SEQS

VOCAB_SIZE = 4096
MAX_OUTPUT_TOKENS = 4096
"""Tokens of one answer, over all choices. More would test the stub workers."""
UNITS = (
    *("a", " ", "a ", "\n", " \n", "word ", "0", "12,", ".", "é", "€", "😀", "\u2028", "\u0301", "\x01", "\x7f"),
    *(
        '"',
        "\\",
        "\\u0061",
        "<|endoftext|>",
        "<|im_start|>",
        "don't ",
        "ﬁ",
        "\ud7ff",
        "中",
        "ا",
        "\u200d",
        "%00",
        "{[(",
    ),
)
"""Texts of which long ones are made."""
SCALES = (1,) * 6 + (2,) * 5 + (8,) * 4 + (64,) * 3 + (512,) * 2 + (4096, 32_768)
"""Typical sizes. Small ones are more frequent, because a run has a time limit."""


def one_in(number: int) -> st.SearchStrategy[bool]:
    """Return a strategy that is rarely true."""
    return st.sampled_from([False] * (number - 1) + [True])


def sizes(most: int) -> st.SearchStrategy[int]:
    """Return a strategy for the size of something that may have at most `most` parts."""
    scales = [scale for scale in SCALES if scale < most]
    return st.one_of(
        st.sampled_from([*scales, most] if scales else [most]),
        st.integers(1, min(most, 40)),
    )


@st.composite
def texts(draw: st.DrawFn, most: int) -> str:
    """Return a text of at most `most` characters: one unit repeated, or several."""
    length = draw(sizes(most))
    units = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=3))
    unit = "".join(units)
    return (unit * (length // len(unit) + 1))[:length]


@st.composite
def token_lists(draw: st.DrawFn, most: int) -> list[int]:
    """Return token ids of a prompt."""
    length = draw(sizes(most))
    begin = draw(st.integers(0, VOCAB_SIZE - 1))
    step = draw(st.sampled_from([0, 0, 1, 17]))
    return [(begin + step * index) % VOCAB_SIZE for index in range(length)]


def numbers(name: str) -> st.SearchStrategy[Any]:
    """Return a strategy for a legal value of a number field: its bounds and some values between them."""
    limit: Limit = LIMITS[name]
    if limit.kind is ValueKind.BOOLEAN:
        return st.booleans()
    low = limit.above if limit.minimum is None else limit.minimum
    assert low is not None
    assert limit.maximum is not None
    if limit.kind is ValueKind.INTEGER:
        return st.sampled_from([int(low), int(limit.maximum), 0 if low <= 0 else 1])
    above = math.nextafter(low, math.inf) if limit.above is not None else low
    return st.sampled_from([above, limit.maximum, (low + limit.maximum) / 2])


OPTIONAL_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "ignore_eos", "skip_special_tokens", "return_token_ids", "timeline", "priority"),
)


@st.composite
def sampling_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Return optional fields of a request, each rarely or at an extreme."""
    body: dict[str, Any] = {
        name: draw(numbers(name)) for name in draw(st.lists(st.sampled_from(OPTIONAL_NUMBERS), unique=True, max_size=5))
    }
    kinds = draw(
        st.lists(st.sampled_from(["stop", "stop_token_ids", "logit_bias", "slo", "stream"]), unique=True, max_size=3)
    )
    if "stop" in kinds:
        body["stop"] = draw(st.lists(texts(1024), min_size=1, max_size=3)) * draw(st.sampled_from([1, 1, 5]))
    if "stop_token_ids" in kinds:
        body["stop_token_ids"] = draw(token_lists(128))
    if "logit_bias" in kinds:
        body["logit_bias"] = {str(index): draw(numbers("logit_bias")) for index in range(draw(sizes(1024)))}
    if "slo" in kinds:
        body["slo"] = {"ttft_ms": draw(numbers("slo.ttft_ms")), "tpot_ms": draw(numbers("slo.tpot_ms"))}
    if "stream" in kinds:
        body["stream"] = True
    return body


@st.composite
def output_sizes(draw: st.DrawFn, num_prompts: int, has_top: bool) -> dict[str, Any]:
    """Return `n`, `max_tokens` and `min_tokens` of a request."""
    most = max(1, MAX_OUTPUT_TOKENS // num_prompts // (8 if has_top else 1))
    max_choices = int(LIMITS["choices"].maximum or 0) // num_prompts
    n = draw(sizes(max(1, min(most, MAX_NUM_SEQS, max_choices))))
    max_tokens = draw(sizes(max(1, min(most // n, 512))))
    body = {"n": n, "max_tokens": max_tokens}
    if draw(st.booleans()):
        body["min_tokens"] = draw(st.sampled_from([0, max_tokens]))
    return body


@st.composite
def completions(draw: st.DrawFn) -> dict[str, Any]:
    """Return the body of a completions request."""
    kind = draw(st.sampled_from(["text", "text", "ids", "ids", "texts", "lists"]))
    count = draw(sizes(256)) if kind in ("texts", "lists") else 1
    most = (MAX_MODEL_LEN - MAX_OUTPUT_TOKENS) // count
    one = draw(texts(most) if kind in ("text", "texts") else token_lists(most))
    body: dict[str, Any] = {"prompt": one if count == 1 else [one] * count}
    body |= draw(sampling_fields())
    if draw(one_in(4)):
        body["logprobs"] = draw(st.sampled_from([0, 1, 20]))
    return body | draw(output_sizes(count, body.get("logprobs", 0) > 1))


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    """Return the body of a chat request."""
    count = draw(sizes(4096))
    most = max(1, (MAX_MODEL_LEN - MAX_OUTPUT_TOKENS - 8 * count) // count // 2)
    content: Any = draw(texts(most))
    if draw(one_in(4)):
        num_parts = min(draw(sizes(2048)), max(1, 24_000 // count))
        content = [{"type": "text", "text": content[: most // num_parts + 1]}] * num_parts
    message = {"role": draw(st.sampled_from(["user", "system", "developer", "assistant"])), "content": content}
    if draw(one_in(4)):
        message["name"] = draw(texts(256))
    body: dict[str, Any] = {"messages": [message] * count} | draw(sampling_fields())
    if draw(one_in(4)):
        body |= {"logprobs": True, "top_logprobs": draw(st.sampled_from([0, 20]))}
    if draw(one_in(6)):
        body["metadata"] = {f"{index}": draw(texts(512)) for index in range(draw(sizes(16)))}
    if draw(one_in(6)):
        body |= {name: draw(texts(512)) for name in draw(st.lists(st.sampled_from(sorted(LABELS)), unique=True))}
    return body | draw(output_sizes(1, bool(body.get("top_logprobs"))))


@st.composite
def tokenize_calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a call of /tokenize or /detokenize."""
    if draw(st.booleans()):
        return DETOKENIZE, {"tokens": draw(token_lists(2**16))}
    if draw(st.booleans()):
        return TOKENIZE, {"prompt": draw(texts(2**20)), "add_special_tokens": draw(st.booleans())}
    return TOKENIZE, {"messages": draw(chats())["messages"]}


LAYOUTS = ("plain", "plain", "plain", "unicode", "spaces", "indented", "escaped")


def encoded(body: Mapping[str, Any], layout: str) -> bytes:
    """Return a JSON body. Layouts other than `plain` are legal, and expensive to read."""
    if layout == "unicode":
        return json.dumps(body, ensure_ascii=False).encode()
    if layout == "indented":
        return json.dumps(body, indent=1).encode()
    if layout == "spaces":
        return json.dumps(body).replace(", ", " \t\r\n ,    ").encode() + b" " * 4096
    text = json.dumps(body)
    return (text.replace("a", "\\u0061") if layout == "escaped" and '"a' not in text else text).encode()


HEADERS = (
    *("x-baton-timeout-ms: 86400000", "x-baton-timeout-ms: 60000", "accept: */*", "authorization: Bearer x"),
    *("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "connection: keep-alive"),
    *("cookie: " + "a=b;" * 2000, "x: " + "y" * 30_000, "expect: 100-continue"),
)
GET_PATHS = (
    *("/v1/models", "/v1/models/demo", "/health", "/ready", "/debug/decisions/last", "/v1/models?x=%41#y"),
    *("/debug/decisions/" + "ab" * 16, "/debug/decisions/" + "ab" * 20_000, "/metrics"),
)


@st.composite
def http_cases(draw: st.DrawFn) -> CostCase:
    """Return a legal HTTP request."""
    route = draw(st.sampled_from(["completions", "completions", "chat", "chat", "tokenize", "get"]))
    headers = tuple(draw(st.lists(st.sampled_from(HEADERS), max_size=2, unique_by=lambda line: line[:6])))
    if route == "get":
        return CostCase(path=draw(st.sampled_from(GET_PATHS)), headers=headers)
    if route == "tokenize":
        path, body = draw(tokenize_calls())
    elif route == "chat":
        path, body = CHAT, draw(chats())
    else:
        path, body = COMPLETIONS, draw(completions())
    if body.get("stream") and draw(st.booleans()):
        body["stream_options"] = {"include_usage": True}
    may_time_out = draw(one_in(31))
    if may_time_out:
        headers = ("x-baton-timeout-ms: 1",)
    content = encoded(body, draw(st.sampled_from(LAYOUTS)))
    return CostCase(path=path, content=content, headers=headers, is_legal=True, may_time_out=may_time_out)


@st.composite
def grpc_cases(draw: st.DrawFn) -> CostCase:
    """Return a legal gRPC call."""
    method = draw(st.sampled_from(["Generate", "Generate", "Generate", "Tokenize", "Detokenize", "ListModels"]))
    if method == "Generate":
        body = draw(completions())
        if isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int):
            body["prompt"] = body["prompt"][0]
        if "seed" in body:
            body["seed"] = min(body["seed"], 2**63 - 1)
        message: Any = to_generate_request(body)
    elif method == "Tokenize":
        message = inference_pb2.TokenizeRequest(prompt=draw(texts(2**20)))
    elif method == "Detokenize":
        message = inference_pb2.DetokenizeRequest(token_ids=draw(token_lists(2**16)))
    else:
        message = inference_pb2.ListModelsRequest()
    path = GENERATE.replace("Generate", method)
    return CostCase(path=path, content=message.SerializeToString(), is_legal=True)


ADMIN_CASES = (
    CostCase(path="/baton.v1.Admin/Status", is_legal=True),
    CostCase(path="/baton.v1.Admin/Explain"),
    CostCase(
        path="/baton.v1.Admin/Explain", content=admin_pb2.ExplainRequest(request_id="ab" * 2**20).SerializeToString()
    ),
    CostCase(path="/baton.v1.Admin/Drain", content=admin_pb2.DrainRequest(worker_id="x" * 2**20).SerializeToString()),
)


def legal_cases() -> st.SearchStrategy[CostCase]:
    """Return a strategy for legal requests of all public routes."""
    return st.one_of(http_cases(), http_cases(), http_cases(), grpc_cases(), st.sampled_from(ADMIN_CASES))
