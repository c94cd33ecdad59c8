"""A placement question and its answers. Every prediction is in seconds."""

from dataclasses import dataclass, replace

from baton.core.errors import Reason
from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.messages.jobs import PrefixSource
from baton.core.request import NO_SLO, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementQuery:
    """Where should this attempt run? `attempt` counts from 0. `num_prompt_tokens` is what must be prefilled,
    replayed outputs included; `num_output_tokens` of them are outputs. `avoid`: workers that failed it.
    `model_fingerprint`: of the weights that wrote what the client has; empty while it has nothing, and any
    that serve `model` will do. `waited_s`: since a gateway received the request. `answer_within_s`: who asks
    takes a scheduler that has said nothing for so long for lost. `trace_context`: W3C's traceparent, or
    empty."""

    request_id: bytes
    attempt: int
    model: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: tuple[BlockHash, ...] = ()
    hash_scheme: str = ""
    model_fingerprint: str = ""
    sample_count: int = 1
    num_output_tokens: int = 0
    adapter: str = ""
    tenant: str = "default"
    slo: Slo = NO_SLO
    priority: int = 0
    deadline_s: float = 600.0
    avoid: tuple[WorkerRef, ...] = ()
    session_key: str = ""
    waited_s: float = 0.0
    answer_within_s: float = 5.0
    trace_context: str = ""

    def later(self, by_s: float) -> "PlacementQuery":
        """The same, asked so much later."""
        return replace(self, waited_s=self.waited_s + by_s, deadline_s=max(0.0, self.deadline_s - by_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who prefills and who decodes. `decode` None: the first token is the last (`max_tokens` 1). `prefill`
    None: the decode worker computes the prompt itself. Never one worker on both sides. Seconds are
    predictions, None where the policy makes none, but for `waiting_s`: so long the request has waited at the
    scheduler."""

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    prefill: WorkerRef | None
    decode: WorkerRef | None
    prefix_source: PrefixSource | None = None
    queue_s: float | None = None
    prefix_pull_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill_overlap_blocks: int = 0
    decode_overlap_blocks: int = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Refused before any prefill is spent: the term that failed, what was predicted and the limit it
    broke."""

    reason: Reason
    message: str
    retry_after_s: float
    term: str = ""
    predicted_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StillWaiting:
    """Not decided yet: the request waits at the scheduler among `num_waiting`, and keeps its place if it is
    asked for again at once."""

    num_waiting: int
