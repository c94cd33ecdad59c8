"""Hand-written requests, each at one maximum of the documentation, or just above it."""

import json
from collections.abc import Iterator
from typing import Any

from baton.v1 import inference_pb2
from tests.integration.gateway.cost_fuzz.cost_case import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    CostCase,
    json_case,
)
from tests.integration.gateway.cost_fuzz.instant_cluster import MAX_MODEL_LEN, MAX_NUM_SEQS
from tests.integration.gateway.cost_fuzz.malformed_requests import CHUNKED

MANY_IDS = [7] * (MAX_MODEL_LEN - 128)


def extremes() -> dict[str, CostCase]:
    """Return the requests by name."""
    return {
        **_completions(),
        **_chats(),
        **_other_forms(),
        **_tokenize_calls(),
        **_grpc_calls(),
        **_bodies(),
        **dict(_framings()),
    }


def _completions() -> dict[str, CostCase]:
    bodies: dict[str, dict[str, Any]] = {
        "longest-prompt-of-ids": {"prompt": MANY_IDS},
        "longest-prompt-of-ids-repeated-in-each-choice": {"prompt": MANY_IDS, "n": 20, "return_token_ids": True},
        "long-prompt-repeated-in-each-event": {
            "prompt": [7] * 20_000,
            "n": MAX_NUM_SEQS,
            "return_token_ids": True,
            "stream": True,
        },
        "longest-text": {"prompt": "a b" * (MAX_MODEL_LEN // 4)},
        "long-text-without-spaces": {"prompt": "a" * 30_000},
        "long-text-of-spaces": {"prompt": " " * 30_000},
        "long-text-of-escapes": {"prompt": "d\u00e9j\u00e0 " * 20_000},
        "256-texts": {"prompt": ["some words of text, more or less " * 100] * 256},
        "256-texts-of-other-characters": {"prompt": ["déjà vu €" * 400] * 256},
        "256-prompts-of-16000-ids": {"prompt": [[7] * 16_000] * 256},
        "choices-1024": {"prompt": [[7]] * 8, "n": MAX_NUM_SEQS},
        "logprobs": {"prompt": "x", "n": 16, "max_tokens": 100, "logprobs": 20},
        "logprobs-of-all-choices": {"prompt": "x", "n": MAX_NUM_SEQS, "max_tokens": 8, "logprobs": 20, "stream": True},
        "stop-strings": {"prompt": "x", "n": 64, "max_tokens": 64, "stop": ["ab" * 511 + str(at) for at in range(16)]},
        "logit-bias": {"prompt": "x", "logit_bias": {str(index): -100 for index in range(1024)}, "n": MAX_NUM_SEQS},
        "stop-token-ids": {"prompt": "x", "stop_token_ids": list(range(1000, 1128)), "n": MAX_NUM_SEQS},
        "many-tokens": {"prompt": "x", "max_tokens": 4000, "timeline": True},
    }
    return {name: json_case(COMPLETIONS, {"max_tokens": 1} | body, note=name) for name, body in bodies.items()}


def _chats() -> dict[str, CostCase]:
    short = {"role": "user", "content": "hello"}
    parts = [{"type": "text", "text": "x"}] * 2
    bodies: dict[str, dict[str, Any]] = {
        "messages-4096": {"messages": [short] * 4096},
        "messages-of-parts": {"messages": [{"role": "user", "content": parts}] * 4096},
        "one-message-of-many-parts": {"messages": [{"role": "user", "content": [parts[0]] * 32_000}]},
        "64-long-messages": {"messages": [{"role": "user", "content": "word " * 1200}] * 64},
        "labels": {"messages": [short], "metadata": {f"{at}": "\u20ac" * 512 for at in range(16)}, "user": "u" * 512},
    }
    cases = {name: json_case(CHAT, {"max_tokens": 1} | body, note=name) for name, body in bodies.items()}
    top = {"messages": [short], "max_tokens": 100, "n": 16, "logprobs": True, "top_logprobs": 20}
    return cases | {"chat-logprobs": json_case(CHAT, top, note="chat-logprobs")}


def _other_forms() -> dict[str, CostCase]:
    user = {"role": "user", "content": "hello"}
    text = {"type": "input_text", "text": "x"}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "description": "word " * 20_000}}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "responses-4096-items": (RESPONSES, {"input": [user] * 4096, "max_output_tokens": 1}),
        "responses-parts": (RESPONSES, {"input": [{"role": "user", "content": [text] * 4096}] * 7}),
        "responses-long-instructions": (
            RESPONSES,
            {"input": "x", "instructions": "word " * 10_000, "max_output_tokens": 1, "stream": True},
        ),
        "responses-many-tokens": (RESPONSES, {"input": "x", "max_output_tokens": 4000, "stream": True}),
        "responses-logprobs": (RESPONSES, {"input": "x", "max_output_tokens": 400, "top_logprobs": 20, "stream": True}),
        "messages-many-tokens": (MESSAGES, {"messages": [user], "max_tokens": 4000, "stream": True}),
        "messages-of-blocks": (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}] * 4, "max_tokens": 1},
        ),
        "messages-results": (
            MESSAGES,
            {
                "messages": [
                    user,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}] * 4094},
                ],
                "max_tokens": 1,
            },
        ),
    }
    cases = {name: json_case(path, body, note=name) for name, (path, body) in bodies.items()}
    refused = json.dumps({"input": "x", "tools": [tool] * 60}).encode()
    return cases | {"responses-tools": CostCase(path=RESPONSES, content=refused, note="responses-tools")}


def _tokenize_calls() -> dict[str, CostCase]:
    mib = 2**20
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "tokenize-a-mebicharacter-of-words": (TOKENIZE, {"prompt": ("some words " * mib)[:mib]}),
        "tokenize-a-mebicharacter-of-emoji": (TOKENIZE, {"prompt": "a 😀" * (mib // 3)}),
        "tokenize-4096-messages": (TOKENIZE, {"messages": [{"role": "user", "content": "hello"}] * 4096}),
        "detokenize-the-most-tokens": (DETOKENIZE, {"tokens": [7] * MAX_MODEL_LEN}),
    }
    return {name: json_case(path, body, note=name, ensure_ascii=False) for name, (path, body) in bodies.items()}


def _grpc_calls() -> dict[str, CostCase]:
    messages: dict[str, Any] = {
        "Generate the-longest-prompt": inference_pb2.GenerateRequest(token_ids=MANY_IDS, max_tokens=1),
        "Generate two-million-ids": inference_pb2.GenerateRequest(token_ids=[7] * 2_000_000, max_tokens=1),
        "Generate many-biases": inference_pb2.GenerateRequest(
            prompt="x", logit_bias=dict.fromkeys(range(200_000), 1.0)
        ),
        "Generate many-stops": inference_pb2.GenerateRequest(prompt="x", stop=["ab"] * 500_000),
        "Generate logprobs": inference_pb2.GenerateRequest(prompt="x", n=MAX_NUM_SEQS, max_tokens=8, logprobs=20),
        "Tokenize a-mebicharacter": inference_pb2.TokenizeRequest(prompt="ab " * (2**20 // 3)),
        "Detokenize the-most-tokens": inference_pb2.DetokenizeRequest(token_ids=[7] * MAX_MODEL_LEN),
    }
    return {
        name: CostCase(
            path=GENERATE.replace("Generate", name.partition(" ")[0]),
            content=message.SerializeToString(),
            is_legal="many" not in name and "million" not in name,
            note=name,
        )
        for name, message in messages.items()
    }


def _bodies() -> dict[str, CostCase]:
    """Return bodies of the largest size that are refused."""
    contents: dict[str, bytes] = {
        "4-million-ids": b'{"prompt": [' + b"1," * 4_000_000 + b"1]}",
        "a-million-large-ids": b'{"prompt": [' + b"123456," * 1_100_000 + b"1]}",
        "2-million-fractions": b'{"prompt": [' + b"1.5," * 2_000_000 + b"1]}",
        "2-million-empty-lists": b'{"prompt": [' + b"[]," * 2_700_000 + b"[]]}",
        "2-million-short-strings": b'{"prompt": "x", "stop": [' + b'"",' * 2_700_000 + b'""]}',
        "a-million-strings": b'{"prompt": "x", "stop": [' + b'"abcd",' * 1_100_000 + b'""]}',
        "8-MiB-string": b'{"prompt": "' + b"a" * (8 * 2**20 - 100) + b'"}',
        "8-MiB-string-of-escapes": b'{"prompt": "' + b"\\u20ac" * 1_300_000 + b'"}',
        "8-MiB-string-not-closed": b'{"prompt": "' + b'\\"' * 4_000_000,
        "many-keys": json.dumps({f"key{index}": index for index in range(400_000)}).encode(),
        "spaces": b'{"prompt": "x"' + b" " * (8 * 2**20 - 100) + b"}",
        "depth": b'{"prompt": ' + b"[" * 31 + b"1" + b"]" * 31 + b"}",
    }
    contents = {name: content[: 8 * 2**20] for name, content in contents.items()}
    return {name: CostCase(path=COMPLETIONS, content=content, note=name) for name, content in contents.items()}


def _framings() -> Iterator[tuple[str, CostCase]]:
    contents = {
        "10000-pipelined-requests": b"GET /health HTTP/1.1\r\n\r\n" * 10_000,
        "chunks-of-one-byte": CHUNKED + b"1\r\n \r\n" * 10_000 + b"0\r\n\r\n",
        "trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
        "headers": b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 15_000 + b"\r\n",
    }
    for name, content in contents.items():
        yield name, CostCase(path="/", content=content, is_raw=True, note=name)
