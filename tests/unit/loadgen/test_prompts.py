"""Conversion of planned segments into what is sent."""

from dataclasses import replace

import pytest

from loadgen.loadgen_errors import LoadgenError
from loadgen.plan.plan import Text
from loadgen.send.prompts import EarlierResponse, new_prompts
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget
from tests.unit.loadgen.plans import chat_plan, plan, request

BATON = Target(urls=("x",), model="m", dialect="baton")
CHAT = Target(urls=("x",), model="m", dialect="openai", api="chat", prompts="text")
ANSWERS = {0: EarlierResponse(token_ids=(7,) * 10, text=" an answer")}


def test_token_prompts_contain_earlier_responses() -> None:
    planned = chat_plan()
    prompts = new_prompts(planned, BATON)
    first, second = prompts.resolve(planned.requests[0], {}), prompts.resolve(planned.requests[2], ANSWERS)
    assert list(second.token_ids[:60]) == list(first.token_ids)
    assert list(second.token_ids[60:70]) == [7] * 10
    assert (len(second.token_ids), second.index, second.max_tokens, second.text) == (75, 2, 8, "")


def test_chat_alternates_between_user_and_assistant() -> None:
    planned = chat_plan()
    messages = new_prompts(planned, CHAT).resolve(planned.requests[2], ANSWERS).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [len(message["content"].split()) for message in messages] == [60, 2, 5]
    assert messages[1]["content"] == " an answer"


def test_texts_keep_their_roles_in_a_chat() -> None:
    planned = plan(request(0, "hello"))
    segments = (
        Text(text="be brief", role="system"),
        Text(text="hi"),
        Text(text="hello", role="assistant"),
        Text(text="more"),
    )
    talk = replace(planned.requests[0], segments=segments)
    assert new_prompts(planned, CHAT).resolve(talk, {}).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ]
    assert new_prompts(planned, BATON).resolve(talk, {}).text == "be briefhihellomore"


def test_warm_up_has_the_same_length_and_shares_nothing() -> None:
    planned = plan(request(0, (0, 50), priority=2), slos={"default": SloTarget(ttft_s=1)})
    for target in (BATON, CHAT):
        prompts = new_prompts(planned, target)
        own, warm, other = (
            prompts.resolve(planned.requests[0], {}),
            prompts.warm_up(0, planned.requests[0]),
            prompts.warm_up(1, planned.requests[0]),
        )
        if target is BATON:
            assert len(warm.token_ids) == 50
            assert len({one.token_ids[0] for one in (own, warm)}) == 2
            assert warm.token_ids != other.token_ids
        else:
            words = [one.messages[0]["content"].split() for one in (own, warm, other)]
            assert len(words[1]) == 50
            assert words[0][0] != words[1][0]
            assert words[1] != words[2]
        assert warm.slo == SloTarget()  # it may take what it takes: nothing is to refuse it


@pytest.mark.parametrize("target", [CHAT, replace(BATON, prompts="text")])
def test_exact_tokens_cannot_be_sent_as_text_or_chat(target: Target) -> None:
    planned = plan(request(0, (0, 5)), request(1, [5, 6, 7]))
    with pytest.raises(LoadgenError, match="exact token ids"):
        new_prompts(planned, target)
    assert list(new_prompts(planned, BATON).resolve(planned.requests[1], {}).token_ids) == [5, 6, 7]


def test_earlier_responses_need_a_server_that_returns_token_ids() -> None:
    with pytest.raises(LoadgenError, match="not known to return token ids"):
        new_prompts(chat_plan(), Target(urls=("x",), model="m", dialect="openai"))
    new_prompts(chat_plan(), Target(urls=("x",), model="m", dialect="openai", prompts="text"))
