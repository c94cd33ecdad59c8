"""Hypothesis strategies for malformed requests: expensive JSON, wrong fields, and broken framing."""

import json
from typing import Any

from hypothesis import strategies as st

from tests.integration.gateway.cost_fuzz.cost_case import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    CostCase,
)
from tests.integration.gateway.cost_fuzz.legal_requests import legal_cases, sizes, texts

MAX_REPEATS = 2**18
PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, TOKENIZE, DETOKENIZE)
FIELDS = (
    *(
        "prompt",
        "messages",
        "input",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "metadata",
        "user",
        "model",
        "tokens",
        "slo",
    ),
    *("stream_options", "n", "tools", "response_format", "unknown_field", "temperature", "seed"),
)
PIECES = (
    *(
        "[],",
        "{},",
        '"",',
        '"a",',
        "1,",
        "1.5,",
        "4294967296,",
        "true,",
        "null,",
        "[1],",
        '{"a":1},',
        "[[]],",
        "[[[[]]]],",
    ),
    *('"\\u0000",', '"\\ud800",', "[", "{", '{"a":', '"', '\\"', ",", " ", "\n", "-", "1e", "9", "NaN,", '"prompt":1,'),
)
"""Pieces of JSON of which bodies are made by repetition."""


@st.composite
def repeated_json(draw: st.DrawFn) -> bytes:
    """Return a body in which a field is one piece many times: closed or not."""
    piece = draw(st.sampled_from(PIECES))
    inner = piece * draw(sizes(MAX_REPEATS))
    begin, end = draw(st.sampled_from([("[", "1]}"), ("{", "}}"), ("", "}"), ('["', '"]}'), ("[", ""), ("[[", "1]]}")]))
    field = draw(st.sampled_from(FIELDS))
    first = draw(st.sampled_from(["", '"prompt": "x", ', '"messages": [{"role": "user", "content": "x"}], ']))
    return f"{{{first}{json.dumps(field)}: {begin}{inner}{end}".encode()


@st.composite
def many_keys(draw: st.DrawFn) -> bytes:
    """Return an object with many or long keys, in a field or at the top."""
    key = draw(texts(4096))
    values = {f"{key}{index}": index for index in range(draw(sizes(max(1, 2**20 // (len(key) + 8)))))}
    field = draw(st.sampled_from(FIELDS))
    return json.dumps(draw(st.sampled_from([values, {"prompt": "x", field: values}]))).encode()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    texts(2**19),
    st.sampled_from([[], {}, [[]], [{}], [None], [""], {"": ""}, [["a", 1]], [1.5], [-1], [2**32], [2**70], 10**4000]),
    st.lists(st.integers(), max_size=5).map(lambda items: items * 5000),
)


@st.composite
def wrong_fields(draw: st.DrawFn) -> bytes:
    """Return a body with fields of wrong types and sizes."""
    body: dict[str, Any] = {"prompt": "x"} if draw(st.booleans()) else {"messages": [{"role": "user", "content": "x"}]}
    body |= {draw(st.sampled_from(FIELDS)): draw(VALUES) for _ in range(draw(st.integers(1, 3)))}
    return json.dumps(body).encode("utf-8", "surrogatepass")


@st.composite
def mutated(draw: st.DrawFn) -> CostCase:
    """Return a legal request with some of its bytes replaced, removed or repeated."""
    case = draw(legal_cases())
    content = bytearray(case.content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        length = draw(st.sampled_from([0, 1, 1, 5, 1000]))
        content[at : at + length] = draw(
            st.sampled_from([b"", b'"', b"\\", b"[", b"}", b",", b"\xff", b"\0", b"9" * 400])
        )
    return CostCase(path=case.path, content=bytes(content) or b"{", note="mutated")


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
FRAMINGS = (
    (b"", b"GET /health HTTP/1.1\r\n\r\n", b""),
    (b"", b"GET / HTTP/1.1\r\n\r\n", b"GET /nothing HTTP/1.1\r\n\r\n"),
    (b"GET /health HTTP/1.1\r\n", b"a:\r\n", b"\r\n"),
    (b"GET /health HTTP/1.1\r\n", b"x-header-name: some value\r\n", b"\r\n"),
    (b"GET /health HTTP/1.1\r\n", b"a: b\r\n c\r\n", b"\r\n"),
    (b"GET /", b"a", b" HTTP/1.1\r\n\r\n"),
    (b"GET /", b"%61", b" HTTP/1.1\r\n\r\n"),
    (b"GET /?", b"a=b&", b" HTTP/1.1\r\n\r\n"),
    (CHUNKED, b"1\r\n \r\n", b"0\r\n\r\n"),
    (CHUNKED, b"1;extension=value\r\n \r\n", b"0\r\n\r\n"),
    (CHUNKED + b"2\r\n{}\r\n0\r\n", b"trailer: value\r\n", b"\r\n"),
    (CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b""),
    (HEAD + b"content-length: 9999999\r\n\r\n", b" ", b""),
    (HEAD + b"content-length: 2\r\n\r\n{}", b"\r\n", b"GET /health HTTP/1.1\r\n\r\n"),
    (HEAD, b"content-length: 2\r\n", b"\r\n{}"),
    (b"", b"nonsense", b"\r\n\r\n"),
    (b"", b"\r\n", b"GET /health HTTP/1.1\r\n\r\n"),
    (b"", b"\x16\x03\x01\x02\x00", b""),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0", b""),
)
"""(begin, what is repeated, end) of the bytes of a connection."""


@st.composite
def framings(draw: st.DrawFn) -> CostCase:
    """Return the bytes of a connection whose HTTP framing is expensive or malformed."""
    begin, repeated, end = draw(st.sampled_from(FRAMINGS))
    content = begin + repeated * draw(sizes(max(1, 2**17 // len(repeated)))) + end
    return CostCase(path="/", content=content, is_raw=True, note="framing")


@st.composite
def grpc_messages(draw: st.DrawFn) -> CostCase:
    """Return a gRPC call whose message has one field many times, or is no message."""
    field = draw(
        st.sampled_from(
            [
                b"R\x00",
                b"R\x01a",
                b"\x18\x07",
                b"\x1a\x01\x07",
                b"\x9a\x01\x00",
                b"\x9a\x01\x02\x08\x07",
                b"\x12\x01a",
                b"\n\x01\xff",
                b"\xfa?\x00",
                b"\x0b",
                b"\x0b\x0c",
                b"\xff",
                b"\x00",
                b"\xa8\x01\x00",
                b"X\xff\xff\xff\xff\x0f",
            ]
        )
    )
    content = field * draw(sizes(MAX_REPEATS))
    if draw(st.booleans()):
        content += b"\x12\1x\x20\1"
    name = draw(st.sampled_from(["Generate", "Generate", "Tokenize", "Detokenize", "ListModels"]))
    return CostCase(path=GENERATE.replace("Generate", name), content=content, note="malformed message")


@st.composite
def json_bodies(draw: st.DrawFn) -> CostCase:
    """Return a POST request whose body is malformed."""
    content = draw(st.one_of(repeated_json(), repeated_json(), many_keys(), wrong_fields(), wrong_fields()))
    return CostCase(path=draw(st.sampled_from(PATHS)), content=content, note="malformed body")


def malformed_cases() -> st.SearchStrategy[CostCase]:
    """Return a strategy for malformed requests of all public routes."""
    return st.one_of(json_bodies(), json_bodies(), mutated(), framings(), grpc_messages())
