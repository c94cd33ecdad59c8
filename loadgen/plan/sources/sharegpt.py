"""Replays the user's own conversations in ShareGPT format, as sessions with the plan's arrival times.

    [{"id": "a1", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}, …]

The file is one JSON list or JSON lines, possibly gzipped; `{"messages": [{"role": "user", "content": "…"},
…]}` is accepted as well. A turn is a user's text and its response. A system text at the start precedes the
first turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from loadgen.loadgen_errors import BadPlan
from loadgen.plan import draws
from loadgen.plan.draws import Floats
from loadgen.plan.lengths import Distribution, draw_lengths
from loadgen.plan.plan import Exact, PlannedRequest, Segment, Text
from loadgen.plan.sources.workloads import Turn, in_order
from loadgen.user_files import open_bytes

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""A tokenizer: returns the token ids of a text without adding any."""

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation. `turns` are (user text, response)."""

    system: str
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations of a file. `num_unusable` counts those that do not start with a user's text and a
    response."""

    usable: list[Conversation]
    num_unusable: int


def read_conversations(path: str | Path) -> Conversations:
    """Read conversations. One that does not alternate, or has an empty text, is cut there.

    Raises BadPlan with the line of invalid JSON, or with the number of the invalid conversation and message.
    """
    usable: list[Conversation] = []
    num_unusable = 0
    for where, entry in _entries(path):
        conversation = _conversation(where, entry)
        if conversation.turns:
            usable.append(conversation)
        else:
            num_unusable += 1
    if not usable:
        raise BadPlan(f"{path}: none of its {num_unusable} conversations starts with a user's text and a response")
    return Conversations(usable, num_unusable)


def replay_conversations(
    times_s: Floats,
    conversations: Sequence[Conversation],
    *,
    seed: int,
    think: Distribution,
    encode: Encode | None = None,
    outputs: Distribution | None = None,
    recorded_answers: bool = True,
    max_turns: int | None = None,
    max_context: int | None = None,
) -> list[PlannedRequest]:
    """Return the requests of one conversation, drawn without replacement, for each arrival time.

    Turns follow one another as in `workloads.sessions`.

    With `encode`, prompts are token ids (each text plus a line feed, no chat template) and responses are as
    long as recorded, unless `outputs` is given. A turn above `max_context` tokens ends its conversation.
    Without it, prompts are texts with their roles, and `outputs` is required.

    `recorded_answers` puts the recorded responses into later turns, so that all servers get equal prompts.
    Otherwise later turns contain the server's own, which requires `encode`. Raises BadPlan.
    """
    if encode is None and (outputs is None or not recorded_answers or max_context is not None):
        raise BadPlan(
            "without --tokenizer the number of tokens is unknown: --output-tokens is required, and --history "
            "answers and --max-context are not possible"
        )
    chosen = _choose(len(conversations), len(times_s), seed)
    num_turns = [min(len(conversations[position].turns), max_turns or 1 << 30) for position in chosen]
    thinks = iter(np.round(think.draw(draws.stream(seed, "think"), sum(num_turns)), 6).tolist())
    lengths = (
        None if outputs is None else iter(draw_lengths(outputs, draws.stream(seed, "output"), sum(num_turns)).tolist())
    )
    turns: list[Turn] = []
    systems: list[tuple[Segment, ...]] = []
    for session, (position, at_s) in enumerate(zip(chosen, times_s.tolist(), strict=True)):
        conversation = conversations[position]
        system = _segments(conversation.system, "system", encode)
        systems.append(system)
        num_context = _num_tokens(system)
        is_over = False
        for number, (user_text, response) in enumerate(conversation.turns[: num_turns[session]]):
            new, answer = _segments(user_text, "user", encode), _segments(response, "assistant", encode)
            think_s = next(thinks) * (number > 0)
            num_output = next(lengths) if lengths is not None else _num_answer_tokens(response, encode)
            at_s += think_s
            num_context += _num_tokens(new) + num_output
            is_over = is_over or (max_context is not None and num_context > max_context)
            if not is_over:
                answer = answer if recorded_answers else ()
                turns.append(
                    Turn(
                        at_s=at_s,
                        session=session,
                        turn=number,
                        think_s=think_s,
                        new=new,
                        num_output=num_output,
                        answer=answer,
                    )
                )
    if not turns:
        raise BadPlan(f"no conversation has a first turn of at most {max_context} tokens; raise --max-context")
    return in_order(turns, times_s.tolist(), systems)


def _choose(num_conversations: int, count: int, seed: int) -> list[int]:
    """Draw `count` different conversations. Raises BadPlan if there are fewer."""
    if count > num_conversations:
        raise BadPlan(
            f"{count} sessions arrive, but there are only {num_conversations} conversations; give fewer "
            "--sessions or shorter --seconds"
        )
    order = np.argsort(draws.stream(seed, "conversations").random(num_conversations), kind="stable")
    chosen: list[int] = order[:count].tolist()
    return chosen


def _segments(text: str, role: str, encode: Encode | None) -> tuple[Segment, ...]:
    if not text:
        return ()
    return (Text(text=f"{text}\n", role=role),) if encode is None else (Exact(token_ids=tuple(encode(f"{text}\n"))),)


def _num_answer_tokens(text: str, encode: Encode | None) -> int:
    assert encode is not None
    return max(1, len(encode(text)))


def _num_tokens(segments: tuple[Segment, ...]) -> int:
    return sum(len(segment.token_ids) for segment in segments if isinstance(segment, Exact))


def _entries(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield (position for messages, a conversation as JSON)."""
    with open_bytes(path) as file:
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadPlan(f"{path}: not UTF-8 text (byte {error.start})") from None
    try:
        if text.lstrip().startswith("["):
            for number, entry in enumerate(json.loads(text), start=1):
                yield f"{path}: conversation {number}", entry
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{path}:{number}", _json(line, f"{path}:{number}")
    except json.JSONDecodeError as error:
        raise BadPlan(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadPlan(f"{where}: not JSON: {error}") from None


def _conversation(where: str, entry: Any) -> Conversation:
    messages = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise BadPlan(f"{where}: a list `conversations` (or `messages`) is missing")
    system, turns, user_text = "", [], ""
    for position, message in enumerate(messages, start=1):
        role, text = _message(f"{where}, message {position}", message)
        if not text.strip():
            break
        if role == "system" and position == 1:
            system = text
        elif role == "user" and not user_text:
            user_text = text
        elif role == "assistant" and user_text:
            turns.append((user_text, text))
            user_text = ""
        else:
            break
    return Conversation(system=system, turns=tuple(turns))


def _message(where: str, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise BadPlan(f"{where}: not an object with `from` and `value` (or `role` and `content`)")
    role, text = message.get("from", message.get("role")), message.get("value", message.get("content"))
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise BadPlan(f"{where}: `from` is {json.dumps(role)}; it must be one of {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise BadPlan(f"{where}: `value` is {json.dumps(text)[:40]}; it must be a string")
    return _ROLES[role.lower()], text
