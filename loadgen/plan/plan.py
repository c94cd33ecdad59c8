"""Data model of a plan: a workload with the prompts and times of all requests, fixed before anything is sent.

A plan is a JSONL file (`.jsonl` or `.jsonl.gz`): a header line, then one line per request in the order of
`index`. Its hash is the SHA-256 of the uncompressed bytes, as `sha256sum plan.jsonl` prints it, and every
report contains it. The same plan drives HTTP, gRPC and the simulator; nothing here imports a client.
`loadgen.plan.plan_file` reads and writes it and documents the lines.

A prompt is a sequence of segments. So a plan of long prompts stays small and states which parts are shared:

    {"id": 17, "num_tokens": 512}     generated tokens; equal ids give equal tokens everywhere in the plan
                                      (`loadgen.plan.prompt_tokens`)
    {"token_ids": [12, 99, …]}        exactly these tokens
    {"text": "…"}                     exactly this text, tokenized by the server; only next to other texts;
                                      "role" is "user" (default), "assistant" or "system" in a chat
    {"answer_of": 4}                  the response to request 4, an earlier turn of the same session
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.slo_target import SloTarget

FORMAT = 1
"""Version of the plan file. Raised when an old reader would misread a new plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """`num_tokens` tokens determined by `segment_id`. A shorter segment with the same id is a prefix of a
    longer one."""

    segment_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """Exactly these token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text, whose number of tokens only the server knows. `role` is its role in a chat: user, assistant or
    system."""

    text: str
    role: str = "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOf:
    """The response to request `index`, an earlier turn of the same session.

    A complete response has `output_tokens` tokens. If the earlier response was not complete, this turn is not
    sent (`cancelled`).
    """

    index: int


Segment = Generated | Exact | Text | AnswerOf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a plan.

    - `at_s`: when to send it, from the start of the run; None for a later turn
    - `after`, `think_s`: a later turn is sent `think_s` after request `after` has ended
    - `output_tokens`: tokens of the response: exactly with the plan's `ignore_eos`, else at most
    - `cancel_after_tokens`: the client cancels after this many tokens; None for never
    - `slo_class`: a key of the plan's `slos`
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
    """Token ids that generated segments may use: `low` to `high` (exclusive) without `excluded`.

    They should be ordinary text tokens, neither special nor unused, so that any server with that tokenizer
    accepts them.
    """

    low: int
    high: int
    excluded: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of token ids."""
        return self.high - self.low - len(self.excluded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A workload.

    - `slos`: the SLO of each class
    - `ignore_eos`: responses have exactly the planned length
    - `made_by`: the arguments that generated the plan
    """

    name: str
    seed: int
    vocabulary: Vocabulary
    requests: tuple[PlannedRequest, ...]
    slos: Mapping[str, SloTarget] = field(default_factory=lambda: {"default": SloTarget()})
    ignore_eos: bool = True
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def num_prompt_tokens(self, request: PlannedRequest) -> int | None:
        """Return the tokens of the full prompt including earlier responses, or None if a part is a text."""
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
        """Return the requests whose prompt and response together exceed `num_tokens`. Texts count as
        empty."""
        return [
            request
            for request in self.requests
            if (self.num_prompt_tokens(request) or 0) + request.output_tokens > num_tokens
        ]
