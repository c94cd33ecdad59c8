"""A workload, frozen before anything is sent: who asks for what, and when it was meant to.

A plan is a JSONL file (`.jsonl`, or `.jsonl.gz`): one header line, then one line a request, in the order of
`index`. Its hash is the SHA-256 of the uncompressed bytes, so `sha256sum plan.jsonl` agrees; every report
carries it. The same plan drives HTTP, gRPC and the simulator, and nothing here imports a client.
`loadgen.plan.plan_file` reads and writes it, and says what each line holds.

A prompt is a sequence of segments, so that a plan of long prompts stays small and says which parts are
shared:

    {"id": 17, "num_tokens": 512}     generated tokens: the same id gives the same tokens, everywhere in the plan (`loadgen.plan.prompt_tokens`)
    {"token_ids": [12, 99, …]}        exactly these
    {"text": "…"}                     exactly this text, tokenized by the server (it cannot be beside other kinds, but other texts);
                                      with "role": "assistant" or "system" it is that one's part of a chat, else the user's
    {"answer_of": 4}                  the tokens that request 4, an earlier turn of the same session, was answered
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.slo_target import SloTarget

FORMAT = 1
"""Raised when an old reader would misread a new plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """`num_tokens` tokens drawn from `segment_id` alone: a shorter segment of the same id is the beginning of
    a longer one."""

    segment_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """These token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """This text; its length in tokens is the server's to say. `role`: who says it where the plan is sent as a
    chat: user, assistant, system."""

    text: str
    role: str = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOf:
    """What request `index`, an earlier turn of the same session, was answered; as many tokens as that
    request's `output_tokens` if its answer was whole. If it was not, this turn is not sent (`cancelled`)."""

    index: int


Segment = Generated | Exact | Text | AnswerOf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request.

    `at_s`: when to send it, from the start of the run; None for a later turn, which goes out `think_s` after
    the request `after` has ended. `output_tokens`: how many the answer is to have; with `ignore_eos` (a
    plan's choice) exactly, else at most. `cancel_after_tokens`: the client leaves after so many (None:
    stays). `slo_class`: a key of the plan's `slos`.
    """

    index: int
    segments: tuple[Segment, ...]
    output_tokens: int
    at_s: float | None = None
    after: int | None = None
    think_s: float = 0.0
    session: str = ""
    turn: int = 0
    tenant: str = ""
    priority: int = 0
    slo_class: str = "default"
    cancel_after_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The token ids that generated segments may hold: `low` to `high` (excluded) without `excluded`. Safe ids
    are ordinary text: neither special nor unused ones, so that any server of that tokenizer takes them."""

    low: int
    high: int
    excluded: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.high - self.low - len(self.excluded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A workload. `made_by`: the arguments it was made with, enough to make it again. `slos`: the promise of
    each class."""

    name: str
    seed: int
    vocabulary: Vocabulary
    requests: tuple[PlannedRequest, ...]
    slos: Mapping[str, SloTarget] = field(default_factory=lambda: {"default": SloTarget()})
    ignore_eos: bool = True
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def num_prompt_tokens(self, request: PlannedRequest) -> int | None:
        """Tokens of its whole prompt, answers of earlier turns included; None if a part is text, which only
        the server can count."""
        total = 0
        for segment in request.segments:
            match segment:
                case Generated(num_tokens=num_tokens):
                    total += num_tokens
                case Exact(token_ids=token_ids):
                    total += len(token_ids)
                case AnswerOf(index=index):
                    total += self.requests[index].output_tokens
                case Text():
                    return None
        return total

    def longer_than(self, num_tokens: int) -> list[PlannedRequest]:
        """Those whose prompt and answer together are; what is text is taken for short."""
        return [
            request
            for request in self.requests
            if (self.num_prompt_tokens(request) or 0) + request.output_tokens > num_tokens
        ]
