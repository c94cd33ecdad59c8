"""Messages of the standing session between a gateway and a worker (`wire.md`, Session). No absolute time, no
client-set transfer field."""

from dataclasses import dataclass

from baton.core.errors import Failure, Reason
from baton.core.ids import NO_DECISION, DecisionId, JobId, WorkerRef
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import Sampling, TokenDelta

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHello:
    """The gateway's first message. `last_seq`: the last worker message it has processed (0 = none).
    `expected`: the life it means."""

    gateway_id: str
    session_id: str
    last_seq: int
    expected: WorkerRef
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHelloReply:
    """The worker's first message. `resumed`: the jobs and messages of `session_id` are still here, from
    `oldest_seq` on."""

    worker: WorkerRef
    layout: KvLayout
    resumed: bool
    oldest_seq: int
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """Where `num_blocks` leading blocks of the prompt can be pulled from."""

    worker: WorkerRef
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both legs of one attempt share. `token_ids` is the original prompt of `num_prompt_tokens` plus
    outputs already delivered. `tpot_slo_s`: promised between two tokens in the mean, 0 for nothing."""

    job: JobId
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: Sampling
    sample_indices: tuple[int, ...]
    deadline_s: float
    priority: int = 0
    cache_salt: bytes = b""
    decision_id: DecisionId = NO_DECISION
    trace_context: str = ""
    tpot_slo_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(Job):
    """Compute the prompt and sample one token for each sample. `reader`: who will pull the KV; None: nobody,
    the request ends here."""

    reader: WorkerRef | None = None
    prefix_source: PrefixSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob(Job):
    """Continue after the prompt. `owner`: whose KV to follow and pull; None (`Local`): compute the prompt
    here. `prefix_source` is of use only then: with an owner there is nothing to compute."""

    owner: WorkerRef | None = None
    prefix_source: PrefixSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End these samples of a job; empty `sample_indices` means all."""

    job: JobId
    reason: Reason
    sample_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Every worker message up to `seq` is processed; the worker may forget them."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """The gateway lives."""


GatewayMessage = SessionHello | PrefillJob | DecodeJob | Cancel | Ack | Ping


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    job: JobId
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Everything new for this gateway since the last message: at most one message an engine step."""

    seq: int
    deltas: tuple[TokenDelta, ...] = ()
    failures: tuple[JobFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent every `heartbeat_s`. Alive is not the same as stepping: `step_age_s` is how long the current step
    has run (0 = idle)."""

    seq: int
    steps_done: int
    step_age_s: float
    draining: bool


WorkerMessage = SessionHelloReply | Step | Heartbeat
