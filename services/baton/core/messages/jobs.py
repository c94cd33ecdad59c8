"""Messages of the session between a gateway and a worker; see docs/design/protocol.md.

Messages contain durations, never absolute times. Clients cannot set any field that concerns transfers.
"""

from dataclasses import dataclass

from baton.core.errors import Failure, Reason
from baton.core.ids import NO_DECISION, DecisionId, JobId, WorkerRef
from baton.core.kv.block_hash import TokenIds
from baton.core.kv.kv_layout import KvLayout
from baton.core.request import NO_HINTS, Sampling, SessionHints, TokenDelta

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHello:
    """The gateway's first message on a stream.

    last_seq: number of the last worker message that it has processed; 0: none
    expected: the worker incarnation that it wants to reach
    """

    gateway_id: str
    session_id: str
    last_seq: int
    expected: WorkerRef
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHelloReply:
    """The worker's first message on a stream.

    resumed: True if the worker still has the session's jobs, and its messages from `oldest_seq` on
    """

    worker: WorkerRef
    layout: KvLayout
    resumed: bool
    oldest_seq: int
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSource:
    """A worker that holds the first `num_blocks` blocks of the prompt, so that they can be pulled from it.

    num_host_blocks, num_disk_blocks: those of them that it was known to hold in its host tier only, and those
        that it must reload from its disk before they can be read; the others are in device memory
    """

    worker: WorkerRef
    num_blocks: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Common fields of the prefill and the decode job of one attempt.

    token_ids: the original prompt (`num_prompt_tokens` tokens), then output tokens that were delivered
    already
    deadline_s: time from receipt until the job is stopped, in seconds
    priority: lower values are scheduled first
    ttft_slo_s: SLO of the time from receipt at the gateway to the first token, in seconds; 0: none
    tpot_slo_s: SLO of the mean time between two tokens, in seconds; 0: none
    waited_s: time since receipt at the gateway, in seconds; 0 if the client has tokens already
    hints: what is known about the next use of its KV
    """

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
    ttft_slo_s: float = 0.0
    tpot_slo_s: float = 0.0
    waited_s: float = 0.0
    hints: SessionHints = NO_HINTS


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(Job):
    """Computes the prompt and samples the first token of each sample.

    reader: the worker that will pull the KV; None if the request ends with this job
    """

    reader: WorkerRef | None = None
    prefix_source: PrefixSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob(Job):
    """Generates the tokens after the prompt.

    owner: the worker to pull the prompt's KV from; None (`Local` on the wire): compute the prompt on this
    worker
    prefix_source: only used without an owner
    """

    owner: WorkerRef | None = None
    prefix_source: PrefixSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Ends samples of a job. Empty `sample_indices` means all samples."""

    job: JobId
    reason: Reason
    sample_indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Acknowledges all worker messages up to `seq`, so that the worker can drop them."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Shows the worker that the gateway is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedJob:
    """A received job with invalid parameters, which the worker answers with `failure`. It is never sent."""

    job: JobId
    failure: Failure


GatewayMessage = SessionHello | PrefillJob | DecodeJob | Cancel | Ack | Ping
ReceivedGatewayMessage = GatewayMessage | RefusedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure:
    """The failure that ends a job."""

    job: JobId
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """New tokens and failures for one gateway. At most one is sent per engine step."""

    seq: int
    deltas: tuple[TokenDelta, ...] = ()
    failures: tuple[JobFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Shows the gateway, every `heartbeat_s`, that the worker is alive and that its steps make progress.

    step_age_s: how long the current step has run; 0: idle
    """

    seq: int
    steps_done: int
    step_age_s: float
    draining: bool


WorkerMessage = SessionHelloReply | Step | Heartbeat
