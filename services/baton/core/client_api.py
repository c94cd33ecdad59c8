"""What clients and operators ask of a gateway, whichever door they come through: gRPC's side of `wire` speaks
to these Protocols.

Requests are plain dicts, as a JSON body of the OpenAI API gives them, so that one validator serves HTTP and
gRPC.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerReport, WorkerRole, WorkerState
from baton.core.ids import WorkerRef
from baton.core.interfaces import Source
from baton.core.kv.block_hash import TokenIds
from baton.core.request import FinishReason, LegTimeline, TokenLogprobs
from baton.core.tokenizer_fingerprint import EMULATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks. `authorization`: the header's value as sent, empty where there was none. `timeout_s`: what is
    left until the client's own deadline, None where it set none. `address`: for logs only."""

    authorization: str = ""
    timeout_s: float | None = None
    address: str = ""
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What is new of one of a request's `n` choices. `text` may lag behind `token_ids`: it holds back
    unfinished characters and what may become a stop string."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalUsage:
    """A whole request's tokens; `num_cached_tokens` of the prompt's were not computed for it."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where a request's time went. `placed_s`, `ttft_s`: from receipt; `tpot_s`: the mean gap between a
    choice's tokens, (last - first) / (tokens - 1), None where no choice has two. `cached_tokens_by_tier`: of
    the prompt, by where the KV lay. Of the last attempt: `waiting_s`, the part of `placed_s` at the
    scheduler; `predicted_ttft_s`, from its placement on, and `predicted_tpot_s`, None where nothing was
    predicted."""

    request_id: str
    attempts: int
    policy: str
    placed_s: float
    total_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    waiting_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    legs: tuple[LegTimeline, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """One message of an answer. The last one, and no other, has `usage`; and `timeline`, when it was asked
    for."""

    choices: tuple[ChoiceDelta, ...] = ()
    usage: TotalUsage | None = None
    timeline: Timeline | None = None

    @property
    def is_last(self) -> bool:
        return self.usage is not None


class Generation(Source[GenerateChunk], Protocol):
    """A request that was accepted. `receive` raises Refused if it fails; `aclose` before the last chunk
    cancels it."""

    @property
    def request_id(self) -> str:
        """As clients are told it, `x-request-id`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """`max_model_len` None: no worker has said it yet."""

    model_id: str
    max_model_len: int | None = None


class InferenceApi(Protocol):
    """Every method raises Refused: for a bad request, key or model, or for what the cluster cannot do now."""

    async def generate(self, body: Mapping[str, Any], caller: Caller) -> Generation:
        """`body` as of `/v1/completions`, with one prompt, and streamed."""
        ...

    async def tokenize(self, body: Mapping[str, Any], caller: Caller) -> TokenIds:
        """`body`: {"model"?, "prompt"}."""
        ...

    async def detokenize(self, body: Mapping[str, Any], caller: Caller) -> str:
        """`body`: {"model"?, "tokens"}."""
        ...

    async def models(self, caller: Caller) -> tuple[ModelInfo, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A process of the cluster that is no worker."""

    process_id: str
    pid: int = 0
    host: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker as operators see it."""

    worker: WorkerRef
    role: WorkerRole
    state: WorkerState
    model: str
    blocks: BlockCounts
    block_size_tokens: int
    block_bytes: int
    pid: int = 0
    host: str = ""
    waiting_seqs: int = 0
    waiting_prefill_tokens: int = 0
    running_seqs: int = 0
    running_context_tokens: int = 0
    open_leases: int = 0
    links: tuple[LinkReport, ...] = ()

    @classmethod
    def of(cls, report: WorkerReport) -> "WorkerStatus":
        return cls(
            worker=report.worker,
            role=report.role,
            state=report.state,
            model=f"{report.model} (emulated)"
            if report.layout.model_fingerprint.startswith(EMULATED)
            else report.model,
            blocks=report.blocks,
            block_size_tokens=report.layout.block_size_tokens,
            block_bytes=report.layout.block_bytes,
            pid=report.pid,
            host=report.host,
            waiting_seqs=report.waiting_seqs,
            waiting_prefill_tokens=report.waiting_prefill_tokens,
            running_seqs=report.running_seqs,
            running_context_tokens=report.running_context_tokens,
            open_leases=report.open_leases,
            links=report.links,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What one gateway knows. `scheduler` None: none answers it; `workers` are then the last that it knew."""

    version: str
    model: str
    gateway: ProcessInfo
    scheduler: ProcessInfo | None = None
    workers: tuple[WorkerStatus, ...] = ()
    open_requests: int = 0


class AdminApi(Protocol):
    """What operators ask. Every method raises Refused, for a bad key too."""

    async def status(self, caller: Caller) -> ClusterStatus: ...

    async def explain(self, request_id: str | None, caller: Caller) -> tuple[DecisionRecord, ...]:
        """The decisions about a request's attempts in order, or about the last request (None); `request_id`
        as in `x-request-id`. Refused (NOT_FOUND) if there are none."""
        ...

    async def drain(self, worker_id: str, caller: Caller, *, node_shutting_down: bool = False) -> None:
        """Returns when the worker has been told. Refused (NOT_FOUND) if nobody knows it.
        `node_shutting_down`: see `SchedulerApi.drain`."""
        ...
