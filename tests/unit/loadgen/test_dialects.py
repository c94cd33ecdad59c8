"""Each kind of server gets only the fields that it supports."""

import json
from typing import Any

import pytest

from loadgen.send.client import ResolvedRequest
from loadgen.send.dialects import DIALECTS, BodyMaker, dialect_of
from loadgen.send.http.http_client import BadUrl, split_url
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget
from tests.loadgen_simulated_servers import plan_at

ASK = ResolvedRequest(index=0, token_ids=(5, 6), max_tokens=9, priority=2, session="s1", slo=SloTarget(ttft_s=0.5))
OPENAI = {"model": "m", "max_tokens": 9, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


def body(kind: str, ask: ResolvedRequest = ASK, *, is_chat: bool = False, **more: Any) -> Any:
    return json.loads(BodyMaker(model="m", dialect=DIALECTS[kind], is_chat=is_chat, more=more).body(ask))


def test_bodies_have_only_supported_fields() -> None:
    assert body("openai") == {**OPENAI, "prompt": [5, 6]}
    assert body("vllm") == {**OPENAI, "prompt": [5, 6], "ignore_eos": True, "return_token_ids": True}
    assert body("sglang") == {**OPENAI, "prompt": [5, 6], "ignore_eos": True}
    ours = {"ignore_eos": True, "return_token_ids": True, "timeline": True, "priority": 2, "session": "s1"}
    assert body("baton") == {**OPENAI, "prompt": [5, 6], **ours, "slo": {"ttft_ms": 500.0}}


def test_text_and_chat_bodies_have_their_prompt_field() -> None:
    text = ResolvedRequest(index=0, text='é "q"', max_tokens=9)
    assert body("openai", text)["prompt"] == 'é "q"'
    assert body("openai", text, is_chat=True) == {**OPENAI, "messages": [{"role": "user", "content": 'é "q"'}]}


def test_user_fields_replace_defaults_and_null_removes_them() -> None:
    changed = body("openai", max_tokens=3, max_completion_tokens=4, temperature=0.7, stream_options=None)
    expected = {**OPENAI, "prompt": [5, 6], "max_tokens": 3, "max_completion_tokens": 4, "temperature": 0.7}
    del expected["stream_options"]
    assert changed == expected
    assert "max_tokens" not in body("openai", max_tokens=None, max_completion_tokens=4)


@pytest.mark.parametrize(
    ("more", "is_ignored"),
    [({"seed": 1}, True), ({"ignore_eos": None}, False), ({"ignore_eos": False}, False), ({"max_tokens": None}, False)],
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_short_responses_count_if_ignore_eos_was_not_sent(
    more: dict[str, object], is_ignored: bool, protocol: str
) -> None:
    target = Target(urls=("http://h:1",), model="m", protocol=protocol, dialect="vllm", more=more)
    assert target.rules(plan_at(1, 5, seed=1)).ignore_eos is is_ignored


def test_dialect_follows_from_owned_by() -> None:
    names = ["baton", "vllm", "sglang", "llamacpp", "llama.cpp", "openai", "Somebody", ""]
    assert [dialect_of(name).name for name in names] == [
        *"baton vllm sglang llamacpp llamacpp openai openai openai".split()
    ]


@pytest.mark.parametrize(
    ("address", "base"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/api/v1/", "https://h/api"),
        ("h:8000", "http://h:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_normalised(address: str, base: str) -> None:
    assert split_url(address).geturl() == base


@pytest.mark.parametrize(
    "address",
    [
        "ftp://h",
        "http://",
        "http://a..b:80",
        "http://h/é",
        "http://h:0",
        "http://h:99999",
        "http://user:secret@h",
        "http://[::1",
    ],
)
def test_invalid_addresses_are_rejected(address: str) -> None:
    with pytest.raises(BadUrl) as raised:
        split_url(address)
    assert "secret" not in str(raised.value)
