"""Which fields a server takes beyond OpenAI's own, and requests as its JSON.

Servers differ in what they do with a field that they do not know: Baton and OpenAI refuse the request, vLLM
ignores it. So each gets only what it is known to take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadgen.send.client import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`token_prompts`: prompts may be token ids. `token_ids`: it returns the answer's. `ignore_eos`: answers
    can be as long as planned. `timeline`: it reports where the time went. `slo`, `priority`: as the body's
    fields of that name. `timeout_header`: the client's deadline, in milliseconds."""

    name: str
    token_prompts: bool = True
    token_ids: bool = False
    ignore_eos: bool = False
    timeline: bool = False
    slo: bool = False
    priority: bool = False
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
            timeout_header="x-baton-timeout-ms",
        ),
        Dialect(name="vllm", token_ids=True, ignore_eos=True),
        Dialect(name="sglang", ignore_eos=True),
        Dialect(name="llamacpp", ignore_eos=True),
        Dialect(name="openai"),
        Dialect(name="text", token_prompts=False),
    )
}
"""`openai` is what any server of that API should take; `text` is for those that do not take token ids."""


def dialect_of(owned_by: str) -> Dialect:
    """By what `/v1/models` says of a model's owner."""
    return DIALECTS.get(owned_by.lower().replace(".", ""), DIALECTS["openai"])


class BodyMaker:
    """Requests' bodies. What all have in common is encoded once."""

    def __init__(self, *, model: str, dialect: Dialect, is_chat: bool, more: Mapping[str, Any]) -> None:
        """`more`: fields of the user's, which replace ours."""
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

    def body(self, ask: Ask) -> bytes:
        if self._is_chat:
            messages = ask.messages or ({"role": "user", "content": ask.text},)
            prompt = '{"messages":' + json.dumps(messages, ensure_ascii=False)
        elif ask.text:
            prompt = '{"prompt":' + json.dumps(ask.text, ensure_ascii=False)
        else:
            prompt = '{"prompt":' + json.dumps(
                ask.token_ids if isinstance(ask.token_ids, list) else list(ask.token_ids)
            )
        own = self._own(ask)
        tail = self._encoded(own) if self._more.keys() & own.keys() else json.dumps(own)[1:-1] + "," + self._tail
        return (prompt + "," + tail).encode()

    def _own(self, ask: Ask) -> dict[str, Any]:
        dialect = self._dialect
        own: dict[str, Any] = {"max_tokens": ask.max_tokens}
        if ask.ignore_eos and dialect.ignore_eos:
            own["ignore_eos"] = True
        if ask.priority and dialect.priority:
            own["priority"] = ask.priority
        if dialect.slo and (ask.slo.ttft_s or ask.slo.tpot_s):
            own["slo"] = {
                name: seconds * 1e3
                for name, seconds in (("ttft_ms", ask.slo.ttft_s), ("tpot_ms", ask.slo.tpot_s))
                if seconds is not None
            }
        return own

    def _encoded(self, own: Mapping[str, Any]) -> str:
        """An object without its opening brace; fields set to null by the user are left out."""
        fields = {**self._common, **own, **self._more}
        return json.dumps({name: value for name, value in fields.items() if value is not None})[1:]
