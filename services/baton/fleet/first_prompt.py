"""The first requests to a new cluster: a warm-up request of `baton up`, and the prompt of the user."""

import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from baton.core.errors import BatonError
from baton.runtime.process.process import process_age_s

TIMEOUT_S = 120.0
WARM_UP = {"prompt": "Ready?", "max_tokens": 2, "temperature": 0}
"""Two tokens, because the second one comes from the decode worker."""


async def warm_up(url: str, model: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
    """Send a short completion request, so that a user's first request does nothing for the first time.

    A refusal (4xx) is accepted: the cluster may require an API key, or an SLO that it cannot meet. Raises
    BatonError if there is no answer or the answer is a server error.
    """
    async with local_client(TIMEOUT_S, transport) as client:
        try:
            response = await client.post(
                f"{url}/v1/completions", json={"model": model, **WARM_UP}, headers=authorization()
            )
        except httpx.HTTPError as error:
            raise BatonError(f"the cluster is up, but a first request failed: {error!r}") from error
    if response.is_server_error:
        raise BatonError(
            f"the cluster is up, but a first request was answered with HTTP {response.status_code}: {response.text}"
        )


async def ask(
    url: str,
    model: str,
    prompt: str,
    *,
    write: Callable[[str], None],
    transport: httpx.AsyncBaseTransport | None = None,
) -> float:
    """Stream one chat answer to `write`, followed by a line that says which workers computed it.

    Uses the API key in the environment variable BATON_API_KEY, if set. Returns the age of this process in
    seconds when the first text arrived. Raises BatonError if there is no answer.
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
    first_text_age_s: float | None = None
    async for event in _events(url, body, transport):
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            if text and first_text_age_s is None:
                first_text_age_s = process_age_s()
            write(text)
        last = event
    write(f"\n{describe_answer(last)}\n")
    return process_age_s() if first_text_age_s is None else first_text_age_s


async def _events(
    url: str, body: dict[str, Any], transport: httpx.AsyncBaseTransport | None
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed chat answer. Raises BatonError if the request fails."""
    try:
        async with (
            local_client(TIMEOUT_S, transport) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=authorization()) as response,
        ):
            if response.status_code != httpx.codes.OK:
                remedy = "; set BATON_API_KEY" if response.status_code == httpx.codes.UNAUTHORIZED else ""
                text = (await response.aread()).decode()
                raise BatonError(f"the first prompt was answered with HTTP {response.status_code}: {text}{remedy}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise BatonError(f"the first prompt failed: {event['error'].get('message')}")
                yield event
    except httpx.TimeoutException as error:
        raise BatonError(
            f"the first prompt failed: nothing arrived for {TIMEOUT_S:g} s; send it without --first-prompt, "
            "from a client that waits longer"
        ) from error
    except httpx.HTTPError as error:
        raise BatonError(f"the first prompt failed: {error!r}; the gateway's log tells why it ended") from error


def local_client(timeout_s: float, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return an HTTP client for the gateway that this command started. It does not verify its certificate."""
    return httpx.AsyncClient(timeout=timeout_s, verify=False, transport=transport)


def authorization() -> dict[str, str]:
    """Return the authorization header for the key in BATON_API_KEY, or no header if it is unset."""
    key = os.environ.get("BATON_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def describe_answer(event: dict[str, Any]) -> str:
    """Describe the workers, the transferred bytes and the latency of a request.

    `event`: the last event of its stream, with the fields `usage` and `baton`.
    """
    timeline, usage = event["baton"], event["usage"]
    prefill, decode = timeline["prefill"], timeline["decode"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    parts = []
    if prefill is not None:
        prompt = f"{usage['prompt_tokens']} tokens" + (f" ({cached} cached)" if cached else "")
        parts.append(f"{prefill['worker_id']} (pid {prefill['pid']}) prefilled {prompt}")
    if decode is not None:
        over = f" over {timeline['transport']}" if timeline["transport"] else ""
        pulled = f"pulled {timeline['kv_bytes'] / 1024:.0f} KiB{over} and " if timeline["kv_bytes"] else ""
        parts.append(f"{decode['worker_id']} (pid {decode['pid']}) {pulled}decoded {usage['completion_tokens']} tokens")
    ttft, tpot = (
        f"{timeline[name] * 1e3:.1f} ms" if timeline.get(name) is not None else "-" for name in ("ttft_s", "tpot_s")
    )
    return f"{'; '.join(parts)}.   TTFT {ttft}   TPOT {tpot}"
