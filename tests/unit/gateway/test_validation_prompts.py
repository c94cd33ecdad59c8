"""All forms of prompts and messages, and the check that they fit the context."""

import asyncio
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from baton.core.client_api import Caller
from baton.core.errors import Reason
from baton.gateway.input.client_call import Endpoint, InvalidField
from baton.gateway.input.validation import ModelLimits, Validator
from baton.gateway.text.tokenizer import ByteTokenizer
from baton.runtime.process import loop_time
from tests.unit.gateway.validator_calls import MAX_LEN, at_once, call, chat, completion, refusal, validator


def test_all_forms_of_prompts_are_accepted() -> None:
    assert [list(r.token_ids) for r in completion(prompt="ab").requests] == [[97, 98]]
    assert [list(r.token_ids) for r in completion(prompt=["a", "b"]).requests] == [[97], [98]]
    assert [list(r.token_ids) for r in completion(prompt=[1, 2]).requests] == [[1, 2]]
    assert [list(r.token_ids) for r in completion(prompt=[[1], [2, 3]]).requests] == [[1], [2, 3]]
    assert isinstance(completion(prompt=[1]).requests[0].token_ids, array)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        1,
        True,
        {},
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        ["a", [1]],
        [[1], "a"],
        [[1], 2],
        [1, "a"],
        [1, True],
        [1, 1.0],
        [1, None],
        [-1],
        [2**32],
        [300],
        [[1], [300]],
        [["a"]],
        [[[1]]],
        ["x"] * 257,
        "a\0",
        "\ud800",
    ],
)
def test_invalid_prompts_are_rejected(prompt: Any) -> None:
    assert refusal({"prompt": prompt}).param == "prompt"


def test_bytes_of_a_long_text_are_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text in ASCII has one byte a character, so nothing is counted."""
    sizes: list[int] = []

    async def at_once_here(count: Callable[[], int]) -> int:
        sizes.append(count())
        return sizes[-1]

    monkeypatch.setattr(asyncio, "to_thread", at_once_here)
    most = loop_time.JSON_CHARACTERS
    for prompt in ("x" * (most + 1), "\u00e9" * most, "\u00e9" * (most + 1)):
        assert refusal({"prompt": prompt}).failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert sizes == [2 * (most + 1)]


def test_missing_prompt_is_rejected() -> None:
    assert refusal({}).param == "prompt"
    assert refusal({}, Endpoint.CHAT).param == "messages"


def test_request_ids_are_random_and_unique() -> None:
    validated = completion(prompt=["a", "b", "c"])
    ids = [request.request_id for request in validated.requests]
    assert len(set(ids)) == 3
    assert {len(id_) for id_ in ids} == {16}
    assert validated.request_id == ids[0]
    given_id = at_once(
        validator().call(Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}, Caller(), received_s=0, request_id=b"x" * 16)
    )
    assert given_id.request_id == b"x" * 16 != given_id.requests[1].request_id


def test_seed_is_that_of_the_client_or_random() -> None:
    assert completion(seed=5).requests[0].sampling.seed == 5
    assert completion(seed=-1).requests[0].sampling.seed == 2**64 - 1
    drawn = completion(prompt=["a", "b"])
    assert drawn.requests[0].sampling.seed != drawn.requests[1].sampling.seed


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {},
        [1],
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": []}],
        [{"role": "robot", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": "a\0"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "user", "content": "x"}] * 4097,
    ],
)
def test_invalid_messages_are_rejected(messages: Any) -> None:
    assert refusal({"messages": messages}, Endpoint.CHAT).param.startswith("messages")


def test_messages_become_a_prompt() -> None:
    validated = call(
        {
            "messages": [
                {"role": "developer", "content": "be brief", "name": None},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "bob",
                },
                {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": None},
            ]
        },
        Endpoint.CHAT,
    )
    assert bytes(list(validated.requests[0].token_ids)) == b"system: be brief\nuser: a\nb\nassistant: \nassistant: "


# Lengths.


def test_prompt_and_max_tokens_must_fit_the_context() -> None:
    assert completion(prompt="x" * 90, max_tokens=10).requests[0].sampling.max_tokens == 10
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        error = refusal({"prompt": "x" * 90, name: 11})
        assert error.failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        assert str(error).startswith(f"input length and `{name}` exceed context limit: 90 + 11 > 100; this model's ")
        assert str(error).endswith(f"shorten prompt, or reduce {name} to 10 or less")


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 5}, {"min_tokens": 5}, {"echo": True, "max_tokens": 0}])
@pytest.mark.parametrize("prompt", ["x" * 100, [1] * 100])
def test_prompt_that_leaves_no_token_is_too_long_by_itself(prompt: Any, limits: dict[str, Any]) -> None:
    """Whatever the answer's length is, no value of it would help."""
    error = refusal({"prompt": prompt} | limits)
    assert error.failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert str(error) == (
        "prompt is too long: 100 tokens > 99 maximum; this model's maximum context length is 100 tokens, with at "
        "least one for the answer; shorten prompt"
    )
    completion(prompt=prompt[:99])


def test_prompt_that_is_truncated_to_too_many_tokens_names_the_field_to_change() -> None:
    error = refusal({"prompt": "x" * 200, "truncate_prompt_tokens": 100})
    assert str(error).endswith("reduce truncate_prompt_tokens to 99 or less")
    error = refusal({"prompt": "x" * 200, "truncate_prompt_tokens": -1, "max_tokens": 100})
    assert str(error).endswith("reduce max_tokens to 99 or less")


def test_default_max_tokens_is_the_remaining_context() -> None:
    assert completion().requests[0].sampling.max_tokens == 16
    assert completion(prompt="x" * 90).requests[0].sampling.max_tokens == 10
    assert completion(min_tokens=20).requests[0].sampling.max_tokens == 20
    assert chat().requests[0].sampling.max_tokens == MAX_LEN - len(b"user: hi\nassistant: ")
    assert call({"prompt": "x"}, max_model_len=None).requests[0].sampling.max_tokens == 16
    assert completion(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
    assert completion(max_completion_tokens=3, max_tokens=3).requests[0].sampling.max_tokens == 3
    assert refusal({"prompt": "x", "max_completion_tokens": 3, "max_tokens": 4}).param == "max_tokens"
    assert refusal({"prompt": "x", "min_tokens": 5, "max_tokens": 4}).param == "min_tokens"


def test_text_that_cannot_fit_is_not_tokenized() -> None:
    class FailingTokenizer(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> Any:
            raise AssertionError("encoded")

    checked = Validator(
        tokenizer=FailingTokenizer(),
        model="demo",
        model_limits=lambda: ModelLimits(max_model_len=9, max_num_seqs=1),
        rng=Random(),
        request_timeout_s=1,
    )
    with pytest.raises(InvalidField, match="at least 5000000"):
        at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x" * 5_000_000}, Caller(), received_s=0))


@pytest.mark.parametrize(
    "body", [{"prompt": "x" * 5_000_000}, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}]
)
def test_text_with_a_too_long_beginning_is_not_tokenized_completely(body: dict[str, Any]) -> None:
    encoded: list[int] = []

    class CountingTokenizer(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> Any:
            encoded.append(len(text))
            return await super().encode(text, add_special_tokens=add_special_tokens)

        def min_tokens_of(self, num_bytes: int) -> int:
            return 0  # as for tokenizers whose normalizer can shorten text

    checked = Validator(
        tokenizer=CountingTokenizer(),
        model="demo",
        model_limits=lambda: ModelLimits(max_model_len=100, max_num_seqs=1),
        rng=Random(),
        request_timeout_s=1,
    )
    with pytest.raises(InvalidField, match="prompt is too long: at least 736 tokens > 99 maximum;"):
        at_once(
            checked.call(Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS, body, Caller(), received_s=0)
        )
    assert encoded == [800]


def test_long_text_with_long_tokens_is_accepted_if_it_fits() -> None:
    class LongTokenTokenizer(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> Any:
            return await super().encode(text[: len(text) // 20])

        def min_tokens_of(self, num_bytes: int) -> int:
            return 0

    checked = Validator(
        tokenizer=LongTokenTokenizer(),
        model="demo",
        model_limits=lambda: ModelLimits(max_model_len=100, max_num_seqs=1),
        rng=Random(),
        request_timeout_s=1,
    )
    validated = at_once(checked.call(Endpoint.COMPLETIONS, {"prompt": "x" * 1000}, Caller(), received_s=0))
    assert validated.requests[0].num_prompt_tokens == 50


def test_number_of_choices_is_bounded() -> None:
    assert len(completion(prompt=["x"] * 16, n=64).requests) == 16
    assert refusal({"prompt": ["x"] * 17, "n": 64}).param == "n"
    assert refusal({"prompt": "x", "n": 65}).param == "n"  # above the number of sequences that one worker runs
    call({"prompt": "x", "n": 65}, max_num_seqs=None)


def test_truncation_keeps_the_last_tokens() -> None:
    def kept(prompt: Any, count: int, **body: Any) -> list[bytes]:
        asked = {"prompt": prompt, "truncate_prompt_tokens": count, "max_tokens": 10} | body
        return [bytes(list(request.token_ids)) for request in call(asked).requests]

    long = "ab" * 500
    assert kept(long, 3) == [b"bab"]
    assert kept([list(b"abc"), list(b"de")], 2) == [b"bc", b"de"]
    assert kept(long, -1) == [long[: MAX_LEN - 10].encode()]
    assert kept(long, -1, max_tokens=None, min_tokens=20) == [long[: MAX_LEN - 20].encode()]
    assert refusal({"prompt": long, "truncate_prompt_tokens": MAX_LEN}).failure.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert refusal({"prompt": "x", "truncate_prompt_tokens": 0}).param == "truncate_prompt_tokens"
    too_long = {"prompt": "x" * (2**20 + 1), "truncate_prompt_tokens": 5}
    assert "can be truncated" in str(refusal(too_long))


def test_special_tokens_follow_the_endpoint_or_the_request() -> None:
    asked: list[bool] = []

    class Recording(ByteTokenizer):
        async def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> Any:
            asked.append(add_special_tokens)
            return await super().encode(text)

    checked = validator()
    checked.tokenizer = Recording(vocab_size=300)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for endpoint, body in ((Endpoint.COMPLETIONS, {"prompt": "x"}), (Endpoint.CHAT, chat)):
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            at_once(checked.call(endpoint, body | more, Caller(), received_s=0.0))
    assert asked == [True, True, False, False, True, False]


def test_best_of_must_equal_n() -> None:
    call({"prompt": "x", "n": 3, "best_of": 3})
    assert refusal({"prompt": "x", "n": 3, "best_of": 4}).param == "best_of"
