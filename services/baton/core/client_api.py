"""Protocols that the gateway offers to clients and operators, independent of HTTP and gRPC.

A request is a plain dict, as parsed from a JSON body of the OpenAI API. One validator therefore serves HTTP
and gRPC.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.cluster.worker_report import (
    BlockCounts,
    LinkReport,
    ReloadCounts,
    TierReport,
    WorkerReport,
    WorkerRole,
    WorkerState,
)
from baton.core.ids import WorkerRef
from baton.core.interfaces import Source
from baton.core.kv.block_hash import TokenIds
from baton.core.request import FinishReason, LegTimeline, PromptLogprobs, TokenLogprobs
from baton.core.request_limits import MAX_SESSION_CHARACTERS
from baton.core.tokenizer_fingerprint import EMULATED


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Metadata of a client's request.

    authorization: value of the `Authorization` header; empty if it was not sent.
    timeout_s: seconds left until the client's deadline; None if the client set none.
    address: address of the client, for logs only.
    trace_context: W3C `traceparent`; empty if it was not sent.
    session: id of the client's session from its headers (`session_of`); empty if none was sent.
    cut_off: gives up the response; ends the client's connection if output that was sent to it is unread.
    """

    authorization: str = ""
    timeout_s: float | None = None
    address: str = ""
    trace_context: str = ""
    session: str = ""
    cut_off: Callable[[], None] = field(default=_nothing, compare=False)


SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-opencode-session",
)
"""Headers, or gRPC metadata, that name a client's session, in order of precedence.

The first one is for every client. Claude Code sends the second, Codex the third or in older releases the
fourth, and opencode the last two.
"""


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session that the headers name, or an empty string.

    A value that is no valid `session` is ignored, because agents send these headers to every server.
    """
    values = (headers.get(name, "") for name in SESSION_HEADERS)
    return next((v for v in values if 0 < len(v) <= MAX_SESSION_CHARACTERS and v.isprintable()), "")


class PartKind(Enum):
    """Kind of a piece of a chat message that the gateway has parsed from the model's text."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    TOOL_ARGUMENTS = "tool_arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePart:
    """New piece of a parsed chat message.

    text: more content, reasoning or arguments; of a `TOOL_CALL`, which begins a call, the name of the tool.
    call_index: number of the call in the message, of `TOOL_CALL` and `TOOL_ARGUMENTS`.
    call_id: id of the call, of `TOOL_CALL`.

    The arguments of a call are JSON, joined from its `TOOL_ARGUMENTS`.
    """

    kind: PartKind
    text: str
    call_index: int = 0
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """New output of one of a request's `n` choices.

    `text` may lag behind `token_ids`, because incomplete characters and possible stop strings are held back.
    `prompt_logprobs` are those of the prompt, with the first output of each choice.
    `parts` has the same text as parts of a message, if the request has a message format; `text` is then
    empty. `stop_string` is the one that ended the choice, or empty.
    """

    index: int
    text: str = ""
    parts: tuple[MessagePart, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    finish: FinishReason | None = None
    stop_string: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalUsage:
    """Token counts of a complete request.

    num_cached_tokens: prompt tokens whose KV was reused.
    num_reasoning_tokens: output tokens of reasoning.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Latencies of one request, in seconds.

    attempts: number of attempts, including the first.
    policy: name of the scheduling policy that placed the first attempt.
    placed_s, ttft_s, total_s: from receipt to the first placement, the first token, and the end.
    tpot_s: mean gap between a choice's tokens, (last - first) / (tokens - 1); None if no choice has two
        tokens.
    cached_tokens_by_tier: prompt tokens whose KV was reused, by cache tier.
    waiting_s: time of the last attempt in the scheduler's queue.
    predicted_ttft_s, predicted_tpot_s: predictions for the last attempt, TTFT from its placement on; None if
        nothing was predicted.
    legs: one entry for each worker of each attempt.
    """

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
    """One message of a streamed response. Only the last one has `usage`, and `timeline` if it was
    requested."""

    choices: tuple[ChoiceDelta, ...] = ()
    usage: TotalUsage | None = None
    timeline: Timeline | None = None

    @property
    def is_last(self) -> bool:
        """True for the last message of a response."""
        return self.usage is not None


class GenerateStream(Source[GenerateChunk], Protocol):
    """Response stream of an accepted request.

    `receive` raises Refused if the request fails. `aclose` before the last chunk cancels the request.
    """

    @property
    def request_id(self) -> str:
        """The request id in hex, as clients see it in `x-request-id`."""
        ...

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Names of the request's unknown fields, as printable ASCII."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that this gateway serves. `max_model_len` is None until a worker has reported it."""

    model_id: str
    max_model_len: int | None = None


class InferenceApi(Protocol):
    """Inference calls of clients.

    Every method raises Refused if the request, key or model is invalid, or if the cluster cannot serve it
    now.
    """

    async def generate(self, body: Mapping[str, Any], caller: Caller) -> GenerateStream:
        """Start a streamed completion. `body` has the fields of `/v1/completions` and exactly one prompt."""
        ...

    def tokenize(self, body: Mapping[str, Any], caller: Caller) -> AbstractAsyncContextManager[TokenIds]:
        """Yield the token ids of `body["prompt"]`. `body["model"]` is optional.

        The memory of the answer is reserved until the context is left.
        """
        ...

    def detokenize(self, body: Mapping[str, Any], caller: Caller) -> AbstractAsyncContextManager[str]:
        """Yield the text of `body["tokens"]`, like `tokenize`."""
        ...

    async def models(self, caller: Caller) -> tuple[ModelInfo, ...]:
        """Return the served models."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """A gateway or scheduler process of the cluster."""

    process_id: str
    pid: int = 0
    host: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Status of one worker as shown to operators."""

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
    kv_dtype: str = ""
    tiers: tuple[TierReport, ...] = ()
    reloads: ReloadCounts = field(default_factory=ReloadCounts)

    @classmethod
    def of(cls, report: WorkerReport) -> "WorkerStatus":
        """Build the status from a worker's report."""
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
            kv_dtype=report.layout.kv_dtype,
            tiers=report.tiers,
            reloads=report.reloads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """State of the cluster as one gateway knows it.

    `scheduler` is None if no scheduler answers the gateway; `workers` is then the last known list.
    """

    version: str
    model: str
    gateway: ProcessInfo
    scheduler: ProcessInfo | None = None
    workers: tuple[WorkerStatus, ...] = ()
    open_requests: int = 0


class AdminApi(Protocol):
    """Calls of operators. Every method raises Refused if the key is not an admin's, or if the call fails."""

    async def status(self, caller: Caller) -> ClusterStatus:
        """Return the state of the cluster as this gateway knows it."""
        ...

    async def explain(self, request_id: str | None, caller: Caller) -> tuple[DecisionRecord, ...]:
        """Return the placement decisions for a request's attempts in order.

        `request_id` is the hex id from `x-request-id`, or None for the last placed request. Raises Refused
        (NOT_FOUND) if no decision is stored for it.
        """
        ...

    async def drain(self, worker_id: str, caller: Caller, *, node_shutting_down: bool = False) -> None:
        """Ask a worker to drain, and return when the command was sent.

        Raises Refused (NOT_FOUND) if no scheduler knows the worker. `node_shutting_down`: see
        `SchedulerApi.drain`.
        """
        ...

    async def clear_tenant(self, tenant: str, caller: Caller) -> tuple[str, ...]:
        """Tell all workers to erase the cached KV of a tenant, and return their ids.

        Raises Refused (NOT_FOUND) if no API key belongs to the tenant.
        """
        ...

    async def cache_stats(self, caller: Caller) -> CacheStats:
        """Return the cache use of the requests that the schedulers have placed since their start."""
        ...

    async def export_cache(
        self,
        tenant: str,
        prompt_json: str,
        write: Callable[[ExportedPrefix | bytes], Awaitable[None]],
        caller: Caller,
    ) -> None:
        """Pass the longest cached prefix of a prompt to `write`: its description, then the bytes of its file.

        prompt_json: JSON object as for POST /tokenize

        Raises Refused (NOT_FOUND) if no block of it is cached.
        """
        ...

    async def check_import(self, caller: Caller) -> None:
        """Raise Refused if the caller may not import caches. Called before anything is read from it."""
        ...

    async def import_cache(
        self, tenant: str, worker_id: str, parts: AsyncIterator[bytes], caller: Caller
    ) -> ImportedPrefix:
        """Load the bytes of an exported file into the cache of a worker.

        worker_id: empty selects the prefill worker with the most free blocks. Raises Refused if the file does
        not fit the worker or the tenant, or is damaged; nothing is imported then.
        """
        ...
