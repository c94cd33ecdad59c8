"""Measures what invalid and huge requests cost a gateway: time of its event loop and of its threads.

python -m bench bad_input [--repeats 5] [--only NAME]

Each request goes over HTTP to a gateway in this process, whose workers are stubs. The table has the status,
the invalid field, the longest time for which the event loop was busy without a break, the processor time of
all threads but the loop's and the client's (parsing, validation, the chat template), and the bytes of the
memory budget that are in use afterwards. Times are the median of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from baton.runtime.process.byte_budget import Account
from tests.integration.gateway.http_gateway import JSON, HttpGateway, http_gateway
from tests.loop_cpu import longest_turn_s
from tests.scripted_chats import chat_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10)}}
LARGE_TEXT = "word " * (8 * 2**20 // 5 - 200)
"""Just below the largest body."""
ROW = "| {:34} | {:20} | {:>9} | {:>6} | {:36} | {:>7} | {:>9} | {:>5} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one request."""

    status: int
    param: str
    loop_s: float
    threads_s: float
    held_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="requests of each kind (5)")
    parser.add_argument("--only", default="", help="only requests whose name contains this text")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.repeats, arguments.only))


async def run(repeats: int, only: str) -> None:
    """Print the table."""
    print(ROW.format("request", "path", "bytes", "status", "field", "loop ms", "thread ms", "held"))
    print(ROW.format("---", "---", "---:", "---:", "---", "---:", "---:", "---:"))
    async with http_gateway(("p0", "prefill"), ("d0", "decode"), tokenizer=chat_tokenizer("qwen3")) as gateway:
        await measure(gateway, CHAT, b'{"messages": []}')  # the first request imports and builds what others use
        for name, path, body in requests():
            if only not in name:
                continue
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            costs = [await measure(gateway, path, content) for _ in range(repeats)]
            print(
                ROW.format(
                    name,
                    f"`{path}`",
                    f"{len(content):,}",
                    costs[0].status,
                    costs[0].param[:36],
                    f"{median(cost.loop_s for cost in costs) * 1e3:.1f}",
                    f"{median(cost.threads_s for cost in costs) * 1e3:.1f}",
                    max(cost.held_bytes for cost in costs),
                ),
                flush=True,
            )


async def measure(gateway: HttpGateway, path: str, content: bytes) -> Cost:
    """Send a request from a thread of its own."""

    def send() -> tuple[int, bytes, float]:
        began_s = time.thread_time()
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", path, content, JSON)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return *found, time.thread_time() - began_s

    process_s, own_s = time.process_time(), time.thread_time()
    loop_s, (status, text, client_s) = await longest_turn_s(asyncio.to_thread(send))
    own_s, process_s = time.thread_time() - own_s, time.process_time() - process_s
    error = json.loads(text).get("error", {})
    param = error.get("param") or error.get("message", "").split(" ")[0]
    budget = gateway.cluster.gateway.budget
    held = sum(budget.used(account) for account in Account if account is not Account.HEADS)
    return Cost(
        status=status,
        param=f"`{param}`",
        loop_s=loop_s,
        threads_s=max(0.0, process_s - own_s - client_s),
        held_bytes=held,
    )


def requests() -> Iterator[tuple[str, str, dict[str, Any] | bytes]]:
    """Yield the name, the path and the body of each request."""
    yield from of_tools()
    yield from of_results()
    yield from of_messages()


def of_tools() -> Iterator[tuple[str, str, dict[str, Any] | bytes]]:
    """Yield requests with too many or too large tools."""
    functions = [{"name": f"f{n}", "description": "d", "parameters": SCHEMA} for n in range(10_000)]
    small = [{"name": function["name"]} for function in functions]
    for name, each in (("10,000 tools", small), ("10,000 tools with schemas", functions)):
        yield name, CHAT, {"messages": [USER], "tools": [{"type": "function", "function": f} for f in each]}
        yield name, RESPONSES, {"input": "hi", "tools": [{"type": "function", **f} for f in each]}
        tools = [{"name": f["name"], "input_schema": f.get("parameters", {})} for f in each]
        yield name, MESSAGES, {"messages": [USER], "max_tokens": 1, "tools": tools}
    large = {"name": "f", "description": LARGE_TEXT}
    yield "a tool of 8 MiB", CHAT, {"messages": [USER], "tools": [{"type": "function", "function": large}]}


def of_results() -> Iterator[tuple[str, str, dict[str, Any] | bytes]]:
    """Yield requests with large results, and with results of unknown calls."""
    function = {"name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    call = {"type": "function_call", "call_id": "c", **function}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    for name, text in (("a result of 8 MiB", LARGE_TEXT), ("a result of 9 MiB", LARGE_TEXT + "x" * 2**20)):
        yield name, CHAT, {"messages": [USER, answer, {"role": "tool", "tool_call_id": "c", "content": text}]}
        output = {"type": "function_call_output", "call_id": "c", "output": text}
        yield name, RESPONSES, {"input": [USER, call, output]}
        result = {"type": "tool_result", "tool_use_id": "c", "content": text}
        yield name, MESSAGES, {"messages": [USER, use, {"role": "user", "content": [result]}], "max_tokens": 1}
    for name, fields in (("tool_call_id missing", {}), ("tool_call_id unknown", {"tool_call_id": "x"})):
        yield name, CHAT, {"messages": [USER, answer, {"role": "tool", "content": "x"} | fields]}
    yield (
        "tool_call_id unknown",
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "call_id": "x", "output": "x"}]},
    )
    unknown = {"type": "tool_result", "tool_use_id": "x", "content": "x"}
    yield "tool_call_id unknown", MESSAGES, {"messages": [{"role": "user", "content": [unknown]}], "max_tokens": 1}


def of_messages() -> Iterator[tuple[str, str, dict[str, Any] | bytes]]:
    """Yield requests with wrong messages, many parts, and deep or many arguments."""
    yield "unknown role", CHAT, {"messages": [{"role": "robot", "content": "x"}]}
    yield "unknown role", RESPONSES, {"input": [{"role": "robot", "content": "x"}]}
    yield "unknown role", MESSAGES, {"messages": [{"role": "robot", "content": "x"}], "max_tokens": 1}
    part = {"type": "image_url", "image_url": {"url": "http://x/"}}
    yield "wrong content part", CHAT, {"messages": [{"role": "user", "content": [part]}]}
    yield "wrong content part", RESPONSES, {"input": [{"role": "user", "content": [part]}]}
    yield "wrong content part", MESSAGES, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    yield "20,000 messages", CHAT, {"messages": [USER] * 20_000}
    parts = [{"type": "text", "text": "x"}] * 30_000
    yield "30,000 parts", CHAT, {"messages": [{"role": "user", "content": parts}]}
    yield "50,000 unknown fields", CHAT, {"messages": [USER], "max_tokens": 1} | {f"k{n}": n for n in range(50_000)}
    deep = b'{"messages": [{"role": "user", "content": "x", "x": %b%b}]}' % (b"[" * 2_000_000, b"]" * 2_000_000)
    yield "a body of 2,000,000 levels", CHAT, deep
    for name, arguments in (
        ("arguments of 1,000,000 levels", '{"a": ' + "[" * 1_000_000 + "]" * 1_000_000 + "}"),
        ("arguments of 1,000,000 values", '{"a": [' + "1.5," * 1_000_000 + "1]}"),
        ("arguments that are not JSON", '{"a": ' * 1_000_000),
    ):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        yield name, CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        yield name, RESPONSES, {"input": [USER, item]}
    value: Any = 1
    for _ in range(29):
        value = {"a": value}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": value}
    yield "input of 30 levels", MESSAGES, {"messages": [{"role": "assistant", "content": [use]}], "max_tokens": 1}


if __name__ == "__main__":
    main()
