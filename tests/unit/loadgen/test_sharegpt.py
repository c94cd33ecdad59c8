"""Recorded conversations: reading, cutting, and planning as texts or tokens."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.lengths import Fixed
from loadgen.plan.plan import AnswerOf, Exact, PlannedRequest, Text
from loadgen.plan.plan_check import check_plan
from loadgen.plan.sources.sharegpt import Conversation, read_conversations, replay_conversations
from tests.unit.loadgen.plans import plan


def conversation(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in messages]}


CHAT = conversation(("human", "Hi"), ("gpt", "Hello!"), ("human", "Bye"), ("gpt", "See you."))
THREE = [Conversation(system="", turns=((f"question {i}", f"answer {i}"), ("more", "less"))) for i in range(3)]


def encode(text: str) -> list[int]:
    """Encode each character as one token."""
    return [ord(character) for character in text]


def replay(times: list[float], conversations: list[Conversation], **options: Any) -> list[PlannedRequest]:
    fields: dict[str, Any] = {"seed": 0, "think": Fixed(2.5)}
    return replay_conversations(np.array(times), conversations, **fields | options)


@pytest.mark.parametrize(
    ("entry", "system", "turns"),
    [
        (CHAT, "", (("Hi", "Hello!"), ("Bye", "See you."))),
        (
            conversation(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!")),
            "Be brief.",
            (("Hi", "Hello!"),),
        ),
        (conversation(("human", "Hi"), ("gpt", "Hello!"), ("human", "Bye")), "", (("Hi", "Hello!"),)),
        (
            conversation(("human", "Hi"), ("gpt", "Hello!"), ("gpt", "Hello?"), ("human", "a"), ("gpt", "b")),
            "",
            (("Hi", "Hello!"),),
        ),
        (conversation(("human", "Hi"), ("gpt", "Hello!"), ("human", " "), ("gpt", "b")), "", (("Hi", "Hello!"),)),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
            "",
            (("Hi", "Ho"),),
        ),
    ],
)
def test_conversations_are_cut_where_they_stop_alternating(tmp_path: Path, entry: Any, system: str, turns: Any) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([entry, conversation(("gpt", "I was first."))]))
    found = read_conversations(path)
    assert found.usable == [Conversation(system=system, turns=turns)]
    assert found.num_unusable == 1


def test_json_lines_and_gzip_are_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(CHAT)}\n\n{json.dumps(CHAT)}\n".encode()))
    assert len(read_conversations(path).usable) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", " none of its 0 conversations starts with"),
        ('[\n{"conversations": [}\n]', "2: not JSON: Expecting value at column 20"),
        (json.dumps(CHAT) + "\n{\n", "2: not JSON: "),
        ("[1]", " conversation 1: a list `conversations` (or `messages`) is missing"),
        ('[{"conversations": {}}]', " conversation 1: a list `conversations`"),
        (
            json.dumps([CHAT, {"conversations": ["hi"]}]),
            " conversation 2, message 1: not an object with `from` and `value`",
        ),
        (
            json.dumps([conversation(("human", "a"), ("tool", "b"))]),
            ' conversation 1, message 2: `from` is "tool"; it must be one of human, user',
        ),
        (
            '[{"conversations": [{"from": "human", "value": 3}]}]',
            " conversation 1, message 1: `value` is 3; it must be a string",
        ),
        (json.dumps({"conversations": 1}), "1: a list `conversations`"),
        (
            json.dumps([conversation(("gpt", "a"))]),
            " none of its 1 conversations starts with a user's text and a response",
        ),
    ],
)
def test_invalid_conversations_are_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(BadPlan) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:{message}")


def test_prompts_are_texts_without_a_tokenizer() -> None:
    requests = replay(
        [1.0], [Conversation(system="Be brief.", turns=(("Hi", "Hello!"), ("Bye", "See you.")))], outputs=Fixed(7)
    )
    check_plan(plan(*requests))
    system, hi, hello, bye = (
        Text(text="Be brief.\n", role="system"),
        Text(text="Hi\n"),
        Text(text="Hello!\n", role="assistant"),
        Text(text="Bye\n"),
    )
    assert [r.segments for r in requests] == [(system, hi), (system, hi, hello, bye)]
    assert [(r.at_s, r.after, r.think_s, r.turn, r.output_tokens) for r in requests] == [
        (1.0, None, 0.0, 0, 7),
        (None, 0, 2.5, 1, 7),
    ]


def test_prompts_are_tokens_with_a_tokenizer() -> None:
    conversation = Conversation(system="", turns=(("Hi", "Hello!"), ("Bye", "See you.")))
    recorded = replay([1.0], [conversation], encode=encode)
    own = replay([1.0], [conversation], encode=encode, recorded_answers=False)
    check_plan(plan(*own))
    assert [r.output_tokens for r in recorded] == [6, 8]
    assert recorded[1].segments == tuple(Exact(token_ids=tuple(encode(text))) for text in ("Hi\n", "Hello!\n", "Bye\n"))
    assert own[1].segments == (own[0].segments[0], AnswerOf(index=0), Exact(token_ids=tuple(encode("Bye\n"))))
    assert [r.output_tokens for r in replay([1.0], [conversation], encode=encode, outputs=Fixed(3))] == [3, 3]


def test_each_arrival_gets_another_conversation() -> None:
    def first_texts(seed: int) -> set[str]:
        requests = replay([0.0, 1.0], THREE, outputs=Fixed(1), seed=seed)
        return {r.segments[0].text for r in requests}  # type: ignore[union-attr]

    assert all(len(first_texts(seed)) == 2 for seed in range(5))
    assert len({frozenset(first_texts(seed)) for seed in range(20)}) == 3
    with pytest.raises(BadPlan, match="4 sessions arrive, but there are only 3 conversations"):
        replay([0.0] * 4, THREE, outputs=Fixed(1))


def test_conversations_are_limited_by_turns_and_context() -> None:
    assert [r.turn for r in replay([0.0], THREE, outputs=Fixed(1), max_turns=1)] == [0]
    long = [Conversation(system="", turns=(("a" * 10, "b" * 10), ("c" * 10, "d" * 10)))]
    assert len(replay([0.0], long, encode=encode, max_context=32)) == 1
    assert len(replay([0.0], long, encode=encode, max_context=50)) == 2
    with pytest.raises(BadPlan, match="no conversation has a first turn of at most 20 tokens"):
        replay([0.0], long, encode=encode, max_context=20)


@pytest.mark.parametrize(
    "options", [{}, {"outputs": Fixed(1), "recorded_answers": False}, {"outputs": Fixed(1), "max_context": 9}]
)
def test_options_that_need_a_tokenizer_are_rejected_without(options: dict[str, Any]) -> None:
    with pytest.raises(BadPlan, match="without --tokenizer"):
        replay([0.0], THREE, **options)
