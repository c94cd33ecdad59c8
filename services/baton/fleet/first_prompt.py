"""The first questions to a new cluster, asked as any client would: one of our own, and the user's, with proof
of the way it took."""

import json
import os
from collections.abc import Callable
from typing import Any

import httpx

from baton.core.errors import BatonError
from baton.runtime.process.process import process_age_s

TIMEOUT_S = 120.0
REHEARSED = {"prompt": "Ready?", "max_tokens": 2, "temperature": 0}


async def rehearse(url: str, model: str) -> None:
    """Have two tokens answered, by the whole way that a user's first request will take: nothing on it is done
    for the first time then. A refusal is an answer, too: of a promise that nobody can keep, or for want of a
    key. Raises BatonError when there is none."""
    async with client_of_ours(TIMEOUT_S) as client:
        try:
            answer = await client.post(
                f"{url}/v1/completions", json={"model": model, **REHEARSED}, headers=authorization()
            )
        except httpx.HTTPError as error:
            raise BatonError(f"the cluster is up, but a first request failed: {error!r}") from error
    if answer.is_server_error:
        raise BatonError(
            f"the cluster is up, but a first request was answered with HTTP {answer.status_code}: {answer.text}"
        )


async def ask(url: str, model: str, prompt: str, *, write: Callable[[str], None]) -> float:
    """Stream one chat answer to `write`, then a line with who computed what. Raises BatonError when there is
    no answer. Where the gateway wants an API key, it is that of the variable BATON_API_KEY.

    Returns the age of this process, in seconds, when the first piece of the answer was there.
    """
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timeline": True,
        "temperature": 0,
        "max_tokens": 128,
        "messages": [{"role": "user", "content": prompt}],
    }
    write(f"\n> {prompt}\n")
    last: dict[str, Any] = {}
    began_at_age_s: float | None = None
    async with (
        client_of_ours(TIMEOUT_S) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=authorization()) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise BatonError(
                f"the first prompt was answered with HTTP {answer.status_code}: {(await answer.aread()).decode()}"
            )
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise BatonError(f"the first prompt failed: {event['error'].get('message')}")
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text and began_at_age_s is None:
                    began_at_age_s = process_age_s()
                write(text)
            last = event
    write(f"\n{proof(last)}\n")
    return process_age_s() if began_at_age_s is None else began_at_age_s


def client_of_ours(timeout_s: float) -> httpx.AsyncClient:
    """For the gateway of this very command, whose certificate is for others to look at."""
    return httpx.AsyncClient(timeout=timeout_s, verify=False)


def authorization() -> dict[str, str]:
    """The header for the key of the variable BATON_API_KEY, if there is one."""
    key = os.environ.get("BATON_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def proof(event: dict[str, Any]) -> str:
    """Who prefilled, what was pulled, who decoded, and how fast, from a stream's last event (`usage` and
    `baton`)."""
    timeline, usage = event["baton"], event["usage"]
    prefill, decode = timeline["prefill"], timeline["decode"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    prompt = f"{usage['prompt_tokens']} tokens" + (f" ({cached} cached)" if cached else "")
    parts = []
    if prefill is not None:
        parts.append(f"{prefill['worker_id']} (pid {prefill['pid']}) prefilled {prompt}")
    if decode is not None:
        pulled = f"{timeline['kv_bytes'] / 1024:.0f} KiB pulled by " if timeline["kv_bytes"] else ""
        by = f" by {timeline['transport']}" if pulled and timeline["transport"] else ""
        parts.append(
            f"{pulled}{decode['worker_id']} (pid {decode['pid']}){by}, which decoded {usage['completion_tokens']}"
        )
    ttft, tpot = (
        f"{timeline[name] * 1e3:.1f} ms" if timeline.get(name) is not None else "-" for name in ("ttft_s", "tpot_s")
    )
    return f"{', '.join(parts)}.   TTFT {ttft}   TPOT {tpot}"


def curl_example(url: str, model: str) -> str:
    """A request to paste into a terminal."""
    body = json.dumps(
        {"model": model, "stream": True, "messages": [{"role": "user", "content": "What does os.getcwd do?"}]}
    )
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
