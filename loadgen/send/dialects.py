"""Request bodies, and the fields beyond OpenAI's API that each kind of server accepts.

Servers treat unknown fields differently: Baton and OpenAI reject the request, vLLM ignores the field. Each
server therefore gets only fields that it is known to accept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.send.client import ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """API extensions of one kind of server.

    - `token_prompts`: prompts may be token ids
    - `token_ids`: responses contain token ids
    - `ignore_eos`: the server can be told to ignore EOS, so that responses have the planned length
    - `timeline`: the server reports how long each stage took
    - `slo`, `priority`, `session`: the body may have these fields
    - `timeout_header`: header for the client's deadline in milliseconds, or empty
    """

    name: str
    token_prompts: bool = True
    token_ids: bool = False
    ignore_eos: bool = False
    timeline: bool = False
    slo: bool = False
    priority: bool = False
    session: bool = False
    timeout_header: str = ""


DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="baton",
            token_ids=True,
            ignore_eos=True,
            timeline=True,
            slo=True,
            priority=True,
            session=True,
            timeout_header="x-baton-timeout-ms",
        ),
        Dialect(name="vllm", token_ids=True, ignore_eos=True),
        Dialect(name="sglang", ignore_eos=True),
        Dialect(name="llamacpp", ignore_eos=True),
        Dialect(name="openai"),
        Dialect(name="text", token_prompts=False),
    )
}
"""Dialects by name. `openai` uses only OpenAI's API; `text` is for servers that do not accept token ids."""


def dialect_of(owned_by: str) -> Dialect:
    """Return the dialect for a model's `owned_by` field in `/v1/models`; `openai` if unknown."""
    return DIALECTS.get(owned_by.lower().replace(".", ""), DIALECTS["openai"])


class BodyMaker:
    """Encodes request bodies. Fields that all requests share are encoded once."""

    def __init__(self, *, model: str, dialect: Dialect, is_chat: bool, more: Mapping[str, Any]) -> None:
        """Encode the shared fields. `more` has the user's fields, which replace loadgen's own."""
        self._dialect = dialect
        self._is_chat = is_chat
        self._more = dict(more)
        common: dict[str, Any] = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if dialect.token_ids:
            common["return_token_ids"] = True
        if dialect.timeline:
            common["timeline"] = True
        self._common = {"model": model, **common}
        self._tail = self._encoded({})

    def body(self, request: ResolvedRequest) -> bytes:
        """Return the JSON body of one request."""
        if self._is_chat:
            messages = request.messages or ({"role": "user", "content": request.text},)
            prompt = '{"messages":' + json.dumps(messages, ensure_ascii=False)
        elif request.text:
            prompt = '{"prompt":' + json.dumps(request.text, ensure_ascii=False)
        else:
            prompt = '{"prompt":' + json.dumps(
                request.token_ids if isinstance(request.token_ids, list) else list(request.token_ids)
            )
        own = self._own(request)
        tail = self._encoded(own) if self._more.keys() & own.keys() else json.dumps(own)[1:-1] + "," + self._tail
        return (prompt + "," + tail).encode()

    def _own(self, request: ResolvedRequest) -> dict[str, Any]:
        dialect = self._dialect
        own: dict[str, Any] = {"max_tokens": request.max_tokens}
        if request.ignore_eos and dialect.ignore_eos:
            own["ignore_eos"] = True
        if request.priority and dialect.priority:
            own["priority"] = request.priority
        if request.session and dialect.session:
            own["session"] = request.session
        if dialect.slo and (request.slo.ttft_s or request.slo.tpot_s):
            own["slo"] = {
                name: seconds * 1e3
                for name, seconds in (("ttft_ms", request.slo.ttft_s), ("tpot_ms", request.slo.tpot_s))
                if seconds is not None
            }
        return own

    def _encoded(self, own: Mapping[str, Any]) -> str:
        """Return a JSON object without its opening brace. Fields that the user set to null are left out."""
        fields = {**self._common, **own, **self._more}
        return json.dumps({name: value for name, value in fields.items() if value is not None})[1:]
