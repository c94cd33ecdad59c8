"""The question where a request should run, and the scheduler's answers. Every prediction is in seconds."""

from dataclasses import dataclass, replace

from baton.core.errors import Reason
from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.block_hash import BlockHash
from baton.core.messages.jobs import PrefixSource
from baton.core.request import NO_SLO, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementQuery:
    """A gateway's question where one attempt of a request should run.

    attempt: counts from 0.
    num_prompt_tokens: tokens to prefill, including outputs of earlier attempts that are replayed.
    num_output_tokens: how many of these are outputs.
    model_fingerprint: weights that generated the outputs which the client has. Empty if it has none: any
        worker that serves `model` will do.
    avoid: workers that have failed the request.
    prefix_key: hash of the first tokens without tenant, model and salt, to explain why a prefix is missing;
        empty if the prompt has no full block.
    session_key: id of the client's session within its tenant; empty if the client sends none. No policy uses
        it.
    waited_s: time since a gateway received the request.
    answer_within_s: the gateway gives up on a scheduler that has not answered within this time.
    trace_context: W3C traceparent, or empty.
    """

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
    tenant: str = "default"
    slo: Slo = NO_SLO
    priority: int = 0
    deadline_s: float = 600.0
    avoid: tuple[WorkerRef, ...] = ()
    prefix_key: bytes = b""
    session_key: str = ""
    waited_s: float = 0.0
    answer_within_s: float = 5.0
    trace_context: str = ""

    def after_waiting(self, seconds: float) -> "PlacementQuery":
        """Return the query as it would be asked `seconds` later."""
        return replace(self, waited_s=self.waited_s + seconds, deadline_s=max(0.0, self.deadline_s - seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The workers that prefill and decode one attempt. They are never the same worker.

    prefill: None if the decode worker computes the prompt itself.
    decode: None if the first token is the last one.
    prefix_source: a third worker whose cached prefix is pulled before prefill.
    queue_s ... tpot_s: predicted seconds; None if the policy predicts none.
    answer_s: predicted seconds from the first token to the last; None if the policy predicts none.
    waiting_s: measured time that the request waited at the scheduler.
    """

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
    answer_s: float | None = None
    prefill_overlap_blocks: int = 0
    decode_overlap_blocks: int = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A refusal before any prefill is spent.

    term: the predicted quantity that exceeded its limit, with `predicted_s` and `limit_s` where they are
        known.
    """

    reason: Reason
    message: str
    retry_after_s: float
    term: str = ""
    predicted_s: float | None = None
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StillWaiting:
    """An interim answer: the request is one of `num_waiting` in the scheduler's admission queue.

    It keeps its position if the gateway repeats the query immediately.
    """

    num_waiting: int
