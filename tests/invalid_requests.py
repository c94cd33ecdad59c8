"""Invalid requests for both public APIs: a table of cases, strategies for bodies, and mutations of bytes."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st

from baton.core.errors import Refused
from baton.core.request_limits import I32_MAX, I64_MIN, LIMITS, U32_MAX, U64_MAX, Limit, ValueKind
from baton.gateway.input import field_policy
from baton.gateway.input.field_table import FieldTable, RefusedField
from baton.rpc.mappers.client_mapper import from_generate_request, to_generate_request
from baton.v1.inference_pb2 import GenerateRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
JSON_HEADERS: Mapping[str, str] = {"content-type": "application/json"}
HELLO: Mapping[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}

LISTS = frozenset(("stop", "stop_token_ids", "allowed_token_ids", "bad_words"))
NOT_BODY_FIELDS = frozenset(
    ("choices", "label", "store", "metadata", "token_ids", "x-baton-timeout-ms", "top_logprobs"),
)
"""Entries of the table of limits that are not fields of a completions body."""
FIELDS: Mapping[str, Limit] = {
    name: limit
    for name, limit in LIMITS.items()
    if name not in NOT_BODY_FIELDS and name.split(".")[0] not in field_policy.CHAT_TEMPLATE
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bad request and the expected error.

    body: the request as a JSON value; or raw: the bytes of the HTTP body.
    error_words: texts that the error message must contain.
    status, code: HTTP status and reason code.
    """

    name: str
    error_words: tuple[str, ...]
    body: Any = None
    raw: bytes | None = None
    path: str = COMPLETIONS
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_HEADERS)
    status: int = 400
    code: str = "invalid_request"

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode() if self.raw is None else self.raw

    @property
    def message(self) -> GenerateRequest | None:
        """The same request as a gRPC message; None if gRPC cannot carry it."""
        is_json = self.raw is None and self.headers is JSON_HEADERS and isinstance(self.body, dict)
        if not is_json or self.path != COMPLETIONS:
            return None
        return message_of(self.body)


def message_of(body: Mapping[str, Any]) -> GenerateRequest | None:
    """Return `body` as a gRPC message; None if gRPC cannot carry every value."""
    try:
        message = to_generate_request(body)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None
    try:
        decoded = from_generate_request(message)
    except Refused:  # before its values could be compared
        return message
    return message if all(_is_same(decoded.get(name), value) for name, value in body.items()) else None


def _is_same(decoded: Any, value: Any) -> bool:
    """Return True if both are equal and have the same types at every level. NaN equals NaN."""
    if isinstance(decoded, dict) and isinstance(value, dict):
        return decoded.keys() == value.keys() and all(_is_same(decoded[name], value[name]) for name in value)
    if isinstance(decoded, list) and isinstance(value, list):
        return len(decoded) == len(value) and all(map(_is_same, decoded, value))
    return type(decoded) is type(value) and (decoded == value or value != value)


def body_with(name: str, value: Any) -> dict[str, Any]:
    """Return a completions body in which only this field may be invalid."""
    body: dict[str, Any] = {"prompt": "x"}
    if name == "logit_bias":
        return body | {name: {"7": value}}
    if "." in name:
        outer, inner = name.split(".")
        body |= {"stream": True} if outer == "stream_options" else {}
        return body | {outer: {inner: value}}
    return body | {name: [value] if name in LISTS else value}


def invalid_json_values(limit: Limit) -> list[Any]:
    """Return values that the limit forbids: of another type, or just outside entry range."""
    wrong: list[Any] = [{}, [[]], "1" if limit.kind is not ValueKind.STRING else 1]
    if limit.kind is ValueKind.BOOLEAN:
        return [*wrong, 0, 1, "true", 1.0]
    if limit.kind is ValueKind.STRING:
        too_long = [] if limit.maximum is None else ["x" * int(limit.maximum + 1)]
        return [*wrong, True, "", "\0", "a\0b", "\ud800", "x\udfffy", *too_long]
    wrong += [True, False, 10**400, -(10**400)]
    if limit.kind is ValueKind.INTEGER:
        wrong += [1.5, 1.0]
    wrong += [limit.maximum + 1] if limit.maximum is not None else []
    wrong += [limit.minimum - 1] if limit.minimum is not None else []
    wrong += [limit.above, limit.above - 1] if limit.above is not None else []
    return wrong


def fields_refused(table: FieldTable) -> dict[str, RefusedField]:
    """Return the fields that an endpoint refuses."""
    return {name: rule for name, rule in table.items() if isinstance(rule, RefusedField)}


def invalid_parameters() -> Iterator[Case]:
    """Yield each field of the table of limits with invalid values."""
    for name, limit in sorted(FIELDS.items()):
        for number, value in enumerate(invalid_json_values(limit)):
            if name == "prompt" and value is True:
                continue  # this error describes valid prompts instead
            yield Case(name=f"{name}-{number}", error_words=(name.split(".")[0],), body=body_with(name, value))


def unimplemented_fields() -> Iterator[Case]:
    """Yield fields of OpenAI's and vLLM's APIs that are not implemented."""
    for path, table, good in (
        (COMPLETIONS, field_policy.COMPLETIONS, {"prompt": "x"}),
        (CHAT, field_policy.CHAT, dict(HELLO)),
    ):
        for name, entry in sorted(fields_refused(table).items()):
            body = good | {name: {"key": "value"}}
            yield Case(
                name=f"{path}-{name}", error_words=(name, entry.advice), body=body, path=path, code="unsupported_field"
            )


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "stop": None,
        "stream": False,
        "stream_options": None,
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "spaces_between_special_tokens": True,
        "skip_special_tokens": True,
    },
    CHAT: {
        "frequency_penalty": 0,
        "logprobs": False,
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "stream": False,
        "store": False,
        "temperature": 1,
        "tool_choice": "none",
        "tools": [],
        "top_p": 1,
        "modalities": ["text"],
        "function_call": "none",
        "functions": [],
        "verbosity": "medium",
        "top_logprobs": 0,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "metadata": {},
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
    },
}
"""Default values of fields according to the documentation of OpenAI and vLLM."""


def accepted_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, body) whose unimplemented fields have no effect: null, default values, and labels."""
    labels = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    for path, table, good in (
        (COMPLETIONS, field_policy.COMPLETIONS, {"prompt": "x"}),
        (CHAT, field_policy.CHAT, dict(HELLO)),
    ):
        short = {"max_tokens": 3}
        yield path, good | short | labels
        for name, default in DEFAULTS[path].items():
            yield path, good | short | {name: default}
        yield path, good | dict.fromkeys(table.keys() - good.keys() - {"max_tokens"}) | short
        yield path, good | short | {"temprature": 1, "t\u00e9mp\u20ac\ud800": {"a": []}}
        for name, entry in sorted(fields_refused(table).items()):
            for default in entry.defaults:
                yield path, good | short | {name: default}


INVALID_JSON: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "JSON object"),
    (b'"text"', "JSON object"),
    (b"\xff\xfe{}", "not valid UTF-8"),
    (b'\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
    (b'{"prompt": "\xc3\x28"}', "not valid UTF-8"),
    (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8"),
    (b'{"prompt": "\\ud800"}', "lone surrogate"),
    (b'{"prompt": "a\\u0000b"}', "NUL"),
    (b'{"prompt": "a\x00b"}', "not valid JSON"),
    (b'{"prompt": "x", "prompt": "y"}', "'prompt' twice"),
    (b'{"prompt": "x", "slo": {"ttft_ms": 1, "ttft_ms": 2}}', "'ttft_ms' twice"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity"),
    (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
    (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
    (b'{"prompt": "x", "metadata": ' + b"[" * 40 + b"]" * 40 + b"}", "nested too deeply"),
    (b'{"prompt": "x",}', "not valid JSON"),
    (b"{'prompt': 'x'}", "not valid JSON"),
    (b'{"prompt": [' + b"[]," * 40 + b'"' + b'\\"' * 100_000, "not valid JSON"),
]
"""Bodies that are not valid JSON objects, and words of the error. A slow depth check would take minutes for
the last one."""

WRONG_CONTENT_TYPES: list[Mapping[str, str]] = [
    {},
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "application/json", "content-encoding": "gzip"},
]


def prompts(max_model_len: int, vocab_size: int) -> Iterator[Case]:
    """Yield prompts that are invalid, too long, or outside the vocabulary."""
    too_long = "context_length_exceeded"
    almost_full = [5] * (max_model_len - 10)
    for prompt in (
        "",
        [],
        [[]],
        [""],
        ["a", [1]],
        [[1], 2],
        [[1], "a"],
        [1, "a"],
        [1, True],
        [1, 1.0],
        [-1],
        [2**32],
        None,
        1,
        True,
        {},
    ):
        yield Case(name=f"prompt-{prompt!r}", error_words=("prompt",), body={"prompt": prompt})
    yield Case(name="no-prompt", error_words=("prompt is missing",), body={})
    for name, body in (
        ("one-over", {"prompt": almost_full, "max_tokens": 11}),
        ("one-over-by-min-tokens", {"prompt": almost_full, "min_tokens": 11}),
        ("one-over-in-a-batch", {"prompt": [[5], almost_full], "max_tokens": 11}),
    ):
        error_words = (str(len(almost_full)), "11", str(max_model_len))
        yield Case(name=name, error_words=error_words, body=body, code=too_long)
    error_words = (str(max_model_len), "is 1", str(max_model_len))
    yield Case(
        name="no-space-for-a-token", error_words=error_words, body={"prompt": [5] * max_model_len}, code=too_long
    )
    yield Case(
        name="long-text",
        error_words=("at least", str(max_model_len)),
        body={"prompt": "word " * 100_000},
        code=too_long,
    )
    long_chat = {"messages": [{"role": "user", "content": "word " * 100_000}]}
    yield Case(name="long-chat", error_words=("at least", str(max_model_len)), body=long_chat, path=CHAT, code=too_long)
    over = f"between 0 and {vocab_size - 1}"
    for name, body in (
        ("prompt", {"prompt": [5, vocab_size]}),
        ("largest", {"prompt": [U32_MAX]}),
        ("stop_token_ids", {"prompt": "x", "stop_token_ids": [vocab_size]}),
        ("logit_bias", {"prompt": "x", "logit_bias": {str(vocab_size): 1.0}}),
    ):
        yield Case(name=f"vocabulary-{name}", error_words=(over,), body=body)
    yield Case(name="vocabulary-detokenize", error_words=(over,), body={"tokens": [vocab_size]}, path=DETOKENIZE)
    yield Case(
        name="too-much-to-detokenize",
        error_words=("are allowed in one call",),
        raw=b'{"tokens":[%b1]}' % (b"1," * 70_000),
        path=DETOKENIZE,
    )
    yield Case(
        name="too-much-to-tokenize",
        error_words=("are allowed in one call",),
        body={"prompt": "x" * (2**20 + 1)},
        path=TOKENIZE,
    )
    yield Case(
        name="other-model",
        error_words=("gpt-4", "demo"),
        body={"prompt": "x", "model": "gpt-4"},
        status=404,
        code="model_not_found",
    )


def invalid_combinations(max_num_seqs: int) -> Iterator[Case]:
    """Yield valid fields that do not fit together, and lists that are too long."""
    for name, body in (
        ("n", {"prompt": ["x"] * 64, "n": max_num_seqs + 1}),
        ("n", {"prompt": "x", "n": max_num_seqs + 1}),
        ("n", {"prompt": ["x"] * 65, "n": 16}),
        ("max_tokens", {"prompt": "x", "max_completion_tokens": 3, "max_tokens": 4}),
        ("min_tokens", {"prompt": "x", "min_tokens": 5, "max_tokens": 4}),
        ("stop", {"prompt": "x", "stop": ["x"] * 17}),
        ("stop", {"prompt": "x", "stop": 5}),
        ("stop_token_ids", {"prompt": "x", "stop_token_ids": [1] * 129}),
        ("logit_bias", {"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(1025)}}),
        ("logit_bias", {"prompt": "x", "logit_bias": {"-1": 1.0}}),
        ("logit_bias", {"prompt": "x", "logit_bias": {"\u0661": 1.0}}),
        ("logit_bias", {"prompt": "x", "logit_bias": [1]}),
        ("stream_options", {"prompt": "x", "stream_options": {"include_usage": True}}),
        ("metadata", {"prompt": "x", "metadata": {str(i): "x" for i in range(17)}}),
        ("user", {"prompt": "x", "user": "a\0"}),
    ):
        yield Case(name=f"combination-{name}", error_words=(name,), body=body)


def cases(*, max_model_len: int, max_num_seqs: int, vocab_size: int) -> list[Case]:
    """Return the complete corpus for a gateway with these limits."""
    found = [
        *prompts(max_model_len, vocab_size),
        *invalid_combinations(max_num_seqs),
        *invalid_parameters(),
        *unimplemented_fields(),
        *(
            Case(name=f"no-json-{i}", error_words=(error_words,), raw=raw)
            for i, (raw, error_words) in enumerate(INVALID_JSON)
        ),
        *(
            Case(name=f"type-{i}", error_words=("application/json",), body={"prompt": "x"}, headers=headers, status=415)
            for i, headers in enumerate(WRONG_CONTENT_TYPES)
        ),
    ]
    return found


def error_over_grpc(message: str, *, has_ids: bool) -> str:
    """Return the error of a completion as it is over gRPC, with a field for token ids and none for `echo`."""
    message = message.removesuffix(" unless echo is true")
    if has_ids:
        return re.sub(r"^prompt(?= contains)|(?<=shorten )prompt", "token_ids", message)
    is_missing = message.startswith("prompt is missing")
    return "the prompt is missing; set prompt, token_ids or fields_json.messages" if is_missing else message


def grpc_only() -> Iterator[tuple[str, bytes, str]]:
    """Yield (name, bytes of a GenerateRequest, words of the error) that HTTP cannot express."""
    for name, limit in sorted(FIELDS.items()):
        for number in (math.nan, math.inf, -math.inf) if limit.kind is ValueKind.NUMBER else ():
            message = to_generate_request(body_with(name, number))
            yield f"{name}={number}", message.SerializeToString(), f"{name} is "
    yield "both-prompts", GenerateRequest(prompt="x", token_ids=[5]).SerializeToString(), "both prompt and token_ids"
    for name, text in (("no-utf8", b"\xff\xfe"), ("surrogate", b"\xed\xa0\x80"), ("cut", b"\xe2\x82")):
        yield f"prompt-{name}", b"\x12" + bytes([len(text)]) + text, ""
    for name, raw in (
        ("truncated", b"\x12\x7fabc"),
        ("no-field", b"\xff" * 9),
        ("group", b"\x13\x13"),
        ("pickle", b"\x80\x04\x95."),
    ):
        yield name, raw, ""


# Bodies for both APIs.

OVER_GRPC = frozenset(GenerateRequest.DESCRIPTOR.fields_by_name) - {"token_ids", "slo", "logit_bias", "prompt"}
SCALARS: Mapping[str, Limit] = {
    name: LIMITS[name] for name in sorted(OVER_GRPC & set(LIMITS)) if LIMITS[name].kind is not ValueKind.STRING
}


@st.composite
def bodies(draw: st.DrawFn, *, numbers: st.SearchStrategy[float] | None = None, max_prompt: int = 30) -> dict[str, Any]:
    """Return a strategy for bodies with the right types and any values. `numbers`: strategy for numbers."""
    floats = st.floats() if numbers is None else numbers
    texts, ids = st.text(max_size=max_prompt), st.lists(st.integers(0, U32_MAX), min_size=1, max_size=5)
    body: dict[str, Any] = {"prompt": draw(st.one_of(texts, ids))}
    for name in draw(st.sets(st.sampled_from(sorted(SCALARS)), max_size=4)):
        limit = SCALARS[name]
        if limit.kind is ValueKind.BOOLEAN:
            value: Any = draw(st.booleans())
        elif limit.kind is ValueKind.INTEGER:
            near = [int(bound) + d for bound in (limit.minimum, limit.maximum) if bound is not None for d in (-1, 0, 1)]
            value = draw(
                st.one_of(st.integers(I64_MIN, -I64_MIN - 1), st.sampled_from(near or [0]), st.integers(-2, 70))
            )
            value = max(0, min(U32_MAX, value)) if name in LISTS else max(I64_MIN, min(-I64_MIN - 1, value))
        else:
            value = draw(st.one_of(floats, st.floats(-3, 3), st.sampled_from([0.0, 1.0, 2.0, -1.0])))
        body[name] = [value] if name in LISTS else value
    if draw(st.booleans()):
        body["stop"] = draw(st.lists(st.text(max_size=3), min_size=1, max_size=18))
    if draw(st.booleans()):
        body["logit_bias"] = draw(st.dictionaries(st.integers(0, 400).map(str), floats, min_size=1, max_size=3))
    if draw(st.booleans()):
        body["slo"] = draw(st.fixed_dictionaries({}, optional={"ttft_ms": floats, "tpot_ms": st.floats(0, 1e9)}))
    return body


# Mutations.

EDGE_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    -0.0,
    1e308,
    -1e308,
    I32_MAX + 1,
    U32_MAX + 1,
    U64_MAX + 1,
    10**400,
    "",
    "\0",
    "\ud800",
    "x" * 5000,
    "\u202e",
    [],
    {},
    [[]],
    [{}],
    {"": ""},
    [None],
    "NaN",
    "true",
    "1",
    "../../etc/passwd",
    {"role": "user"},
    ["x"] * 300,
    [1] * 300,
]
EDGE_BYTES = [
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b'"',
    b"\\",
    b"{",
    b"]",
    b"\r\n",
    b"\n",
    b":",
    b",",
    b"\xf0\x9f\x98\x80",
    b"9" * 400,
    b"%00",
]


def mutated_value(rng: Random, value: Any) -> Any:
    """Return a copy of `value` with one part replaced, doubled, renamed or omitted."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        rest = {key: item for key, item in value.items() if key != name}
        kind = rng.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return rest | {name + rng.choice(["", " ", "s", "\0", "\ud800"]): value[name]}
        return rest | {name: mutated_value(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_value(rng, value[at]), *value[at + rng.randrange(2) :]]
    return rng.choice(EDGE_VALUES)


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Return a copy of `data` with a few cuts, flipped bits, repetitions or insertions."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.randrange(1, 9))
        kind = rng.randrange(6)
        if kind == 0:
            del out[at:]
        elif kind == 1:
            del out[at:end]
        elif kind == 2:
            out[at:at] = rng.choice(EDGE_BYTES)
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            out[at:at] = out[at:end] * rng.randrange(1, 50)
        elif at < len(out):
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)
