"""Converts a planned request into what is sent: token ids, a text or a chat."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loadgen.loadgen_errors import LoadgenError
from loadgen.plan.plan import AnswerOf, Exact, Plan, PlannedRequest, Segment, Text
from loadgen.plan.prompt_tokens import tokens_of, warm_up_tokens
from loadgen.plan.vocabulary import words_of
from loadgen.plan.words import COMMON_WORDS, Words, text_of, warm_up_text
from loadgen.send.client import Messages, ResolvedRequest
from loadgen.send.target import Target
from loadgen.slo_target import SloTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierResponse:
    """The response to an earlier turn, for prompts that contain it."""

    token_ids: tuple[int, ...]
    text: str


class Prompts(Protocol):
    """Resolves planned requests into requests that a client can send."""

    def resolve(self, request: PlannedRequest, answers: Mapping[int, EarlierResponse]) -> ResolvedRequest:
        """Return the request with its prompt resolved. `answers` has the earlier responses that the prompt
        contains."""

    def warm_up(self, number: int, request: PlannedRequest) -> ResolvedRequest:
        """Return a warm-up request as long as `request` that shares no prefix with the plan."""


def new_prompts(plan: Plan, target: Target) -> Prompts:
    """Return the `Prompts` for a plan and a target. Raises LoadgenError if the plan cannot be sent in that
    form."""
    kinds = {type(segment) for request in plan.requests for segment in request.segments}
    is_chat = target.api == "chat"
    if is_chat or target.prompts == "text" or Text in kinds:
        if Exact in kinds:
            raise LoadgenError(
                f"the plan contains exact token ids, which cannot be sent as a {'chat' if is_chat else 'text'}; "
                "make the plan with "
                "`loadgen plan sharegpt` without --tokenizer, which keeps texts"
            )
        return TextPrompts(plan, words_of(target.tokenizer) if target.tokenizer else COMMON_WORDS, is_chat=is_chat)
    if AnswerOf in kinds and not target.takes.token_ids:
        raise LoadgenError(
            f"the plan's later turns contain earlier responses, but a `{target.dialect}` server is not known to "
            "return token ids; "
            "use --api chat or --prompts text, or name the kind of server with --dialect"
        )
    return TokenPrompts(plan)


class TokenPrompts:
    """Implements `Prompts` with token ids."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def resolve(self, request: PlannedRequest, answers: Mapping[int, EarlierResponse]) -> ResolvedRequest:
        responses = {s.index: answers[s.index].token_ids for s in request.segments if isinstance(s, AnswerOf)}
        return replace(_without_prompt(self._plan, request), token_ids=tokens_of(self._plan, request, responses))

    def warm_up(self, number: int, request: PlannedRequest) -> ResolvedRequest:
        num_tokens = self._plan.num_prompt_tokens(request) or 1
        return replace(
            _without_prompt(self._plan, request),
            slo=SloTarget(),
            token_ids=warm_up_tokens(self._plan, number, num_tokens),
        )


class TextPrompts:
    """Implements `Prompts` with texts or chats. In chats, responses have the role `assistant`; the rest is
    `user`."""

    def __init__(self, plan: Plan, words: Words, *, is_chat: bool) -> None:
        self._plan = plan
        self._is_chat = is_chat
        self._words = words

    def resolve(self, request: PlannedRequest, answers: Mapping[int, EarlierResponse]) -> ResolvedRequest:
        texts = {index: answer.text for index, answer in answers.items()}
        resolved = _without_prompt(self._plan, request)
        if self._is_chat:
            return replace(resolved, messages=self._messages(request, texts))
        return replace(resolved, text=self._text(request, request.segments, texts))

    def warm_up(self, number: int, request: PlannedRequest) -> ResolvedRequest:
        text = warm_up_text(self._plan, number, self._plan.num_prompt_tokens(request) or 16, self._words)
        resolved = replace(_without_prompt(self._plan, request), slo=SloTarget())
        return (
            replace(resolved, messages=({"role": "user", "content": text},))
            if self._is_chat
            else replace(resolved, text=text)
        )

    def _messages(self, request: PlannedRequest, texts: Mapping[int, str]) -> Messages:
        """Merge neighbouring segments of one role into one message. Responses are sent back unchanged."""
        return [
            {
                "role": role,
                "content": "".join(texts[s.index] for s in segments if isinstance(s, AnswerOf))
                or self._text(request, segments, texts),
            }
            for role, run in itertools.groupby(request.segments, key=_role)
            if (segments := list(run))
        ]

    def _text(self, request: PlannedRequest, segments: Sequence[Segment], texts: Mapping[int, str]) -> str:
        return text_of(self._plan, replace(request, segments=tuple(segments)), texts, self._words)


def _role(segment: Segment) -> str:
    match segment:
        case AnswerOf():
            return "assistant"
        case Text(role=role):
            return role
    return "user"


def _without_prompt(plan: Plan, request: PlannedRequest) -> ResolvedRequest:
    return ResolvedRequest(
        index=request.index,
        max_tokens=request.output_tokens,
        ignore_eos=plan.ignore_eos,
        priority=request.priority,
        session=request.session,
        slo=plan.slos.get(request.slo_class, SloTarget()),
    )
