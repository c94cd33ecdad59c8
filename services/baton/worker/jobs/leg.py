"""Base classes of the legs. A leg is the work of one job on this worker, from receipt to its last message."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash, chain, root_hash, tenant_root
from baton.core.kv.kv_events import Tier
from baton.core.messages.jobs import DecodeJob, Job, PrefillJob, PrefixSource
from baton.core.request import LegTimeline, SessionKey, TokenDelta, TokenLogprobs, Usage
from baton.engine.constraints.sampling_rules import SamplingRules
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.loop import EngineLoop
from baton.engine.retention.content_owners import ContentOwners
from baton.engine.state.outcome import AdmittedSequence, GrownSequence, PrefillProgress, SequenceOutput
from baton.engine.state.sequence import SequenceRequest, max_cached_blocks
from baton.engine.state.step import SampledToken
from baton.runtime.logging import get_logger
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.jobs.prefix_puller import PrefixPuller
from baton.worker.tiers.prefetches import Prefetches
from baton.worker.tiers.reloads import Reloads

log = get_logger(__name__)

NOTHING_RELOADED: Mapping[Tier, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LegParts:
    """Services and constants that every leg uses.

    moves_sessions: KV is evicted first if its session goes on at another worker
    """

    worker: WorkerRef
    pid: int
    engine: EngineLoop
    pool: BlockPool
    owner: OwnerService
    reader: KvReader
    reloads: Reloads | None
    prefetches: Prefetches | None
    owners: ContentOwners
    prefixes: PrefixPuller
    tasks: BackgroundTasks
    constraints: TokenConstraints
    model_fingerprint: str
    sampler_version: int
    block_size_tokens: int
    pull_wait_s: float
    moves_sessions: bool
    tracing: Tracing = OFF


class LegOutput(Protocol):
    """Receives the messages of a leg. The last one is either a delta with `is_last` or a failure."""

    def delta(self, delta: TokenDelta, *, is_last: bool) -> None:
        """Send new tokens; the job ends with them if `is_last`."""
        ...

    def fail(self, failure: Failure) -> None:
        """Send the failure that ends the job."""
        ...

    def counted(self) -> None:
        """Record that the worker's own numbers contain the job, so that a scheduler may drop its
        reservation."""
        ...


class Leg(ABC):
    """The work of one job on this worker.

    `RunningLegs` calls `admitted`, `progressed` and `produced` with the engine's outcomes.

    seq_id: the job's sequence in the engine
    is_preparing: the leg waits for KV or for its grammar, and is not in the engine yet
    reads_from_peer: it waits for KV of another worker before that
    num_output_tokens: tokens that this leg generated, counted for samples that have ended
    """

    def __init__(self, job: Job, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        self.seq_id = seq_id
        self.has_ended = False
        self.is_preparing = self.reads_from_peer = False
        self._job = job
        self.num_output_tokens = 0
        self._open_samples = set(job.sample_indices)
        self._rules: SamplingRules | None = None  # held so that they stay prepared
        self._parts = parts
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._root = chain_root(parts.model_fingerprint, job.cache_salt, parts.block_size_tokens)
        self._tenant_root = chain_tenant(parts.model_fingerprint, job.cache_salt, parts.block_size_tokens)
        self._hashes = tuple(chain(self._root, job.token_ids, parts.block_size_tokens))
        self._owned = parts.owners.arrived(job.hints, self._hashes[0] if self._hashes else None)

    @property
    def open_samples(self) -> frozenset[int]:
        """Indices of the samples that have not ended."""
        return frozenset(self._open_samples)

    @abstractmethod
    def begin(self) -> None:
        """Start the work. Raises Refused if the worker cannot take it."""

    @abstractmethod
    def admitted(self, admission: AdmittedSequence) -> None:
        """Handle that the engine has allocated the blocks of the sequence."""

    @abstractmethod
    def _send_output(self, output: SequenceOutput, *, is_last: bool) -> None:
        """Send new tokens of an open sample. The job ends with them if `is_last`."""

    @abstractmethod
    def _ends_sample(self, output: SequenceOutput) -> bool:
        """Return True if this leg's part of the sample ends with `output`."""

    @abstractmethod
    def _release(self, failure: Failure) -> None:
        """Free what the leg holds in engine and transfers.

        Called once, if the leg ends before its work is done.
        """

    def progressed(self, progress: PrefillProgress) -> None:  # noqa: B027 - only a prefill leg announces
        """Handle that a step has computed part of the prompt."""

    def grown(self, growth: GrownSequence) -> None:  # noqa: B027 - only a prefill leg has a reader
        """Handle that the engine has allocated further blocks of the sequence."""

    def produced(self, output: SequenceOutput) -> None:
        """Handle new tokens of one sample, or the failure of the sequence.

        Tokens of a cancelled sample are dropped; a step that was already running may still produce some.
        """
        if self.has_ended or output.sample_index not in self._open_samples:
            return
        if output.failure is not None:
            self.stop(output.failure)
            return
        if self._ends_sample(output):
            self._open_samples.discard(output.sample_index)
            self.num_output_tokens += (
                output.output_index + len(output.tokens) - (len(self._job.token_ids) - self._job.num_prompt_tokens)
            )
            self.has_ended = not self._open_samples
            if self.has_ended:
                self._rules = None
        self._send_output(output, is_last=self.has_ended)

    def cancel(self, sample_indices: Sequence[int], reason: Reason) -> None:
        """End these samples, or all if `sample_indices` is empty. The job ends with its last sample."""
        if self.has_ended:
            return
        cancelled = self._open_samples & set(sample_indices) if sample_indices else set(self._open_samples)
        self._open_samples -= cancelled
        if not self._open_samples:
            self.stop(Failure(code=Code.CANCELLED, reason=reason, message=f"the job was cancelled: {reason.value}"))
        elif cancelled:
            self._parts.engine.cancel(self.seq_id, tuple(sorted(cancelled)))

    def stop(self, failure: Failure) -> None:
        """End the job with `failure`, unless it has ended."""
        if self.has_ended:
            return
        self.has_ended = True
        self._rules = None
        self._release(failure)
        self._output.fail(failure)

    def left(self) -> None:
        """Record that the job has ended and has left its content. Called once."""
        self._parts.owners.ended(self._owned)
        if self._parts.prefetches is not None:
            self._parts.prefetches.expect(self._owned)

    async def _prepare_rules(self) -> None:
        """Compile the request's grammar and replay its output tokens, so that no step does it.

        Raises Refused if the grammar is invalid or too expensive.
        """
        if self._job.sampling.is_constrained:
            outputs = self._job.token_ids[self._job.num_prompt_tokens :]
            rules = await self._parts.constraints.prepare(self._job.sampling, outputs)
            self._rules = None if self.has_ended else rules

    def _request(
        self, *, prefill_only: bool = False, for_reader: bool = False, pulled: bool = False
    ) -> SequenceRequest:
        return SequenceRequest(
            seq_id=self.seq_id,
            token_ids=self._job.token_ids,
            num_prompt_tokens=self._job.num_prompt_tokens,
            sampling=self._job.sampling,
            root_hash=self._root,
            block_hashes=self._hashes,
            tenant_root=self._tenant_root,
            sample_indices=tuple(sorted(self._open_samples)),
            priority=self._job.priority,
            ttft_slo_s=self._job.ttft_slo_s,
            tpot_slo_s=self._job.tpot_slo_s,
            waited_s=self._job.waited_s + self._loop.time() - self._started_s,
            prefill_only=prefill_only,
            for_reader=for_reader,
            pulled=pulled,
            owner=self._owned.owner,
        )

    def _send_delta(
        self, output: SequenceOutput, *, usage: Usage | None = None, timeline: LegTimeline | None = None
    ) -> None:
        delta = TokenDelta(
            job=self._job.job,
            sample_index=output.sample_index,
            output_index=output.output_index,
            token_ids=tuple(token.token_id for token in output.tokens),
            logprobs=logprobs_of(output.tokens),
            finish=output.finish,
            usage=usage,
            timeline=timeline,
            prompt_logprobs=output.prompt_logprobs,
            is_last=self.has_ended,
        )
        self._output.delta(delta, is_last=self.has_ended)

    def _usage(self, num_cached_tokens: int, reloaded_tokens: Mapping[Tier, int] = NOTHING_RELOADED) -> Usage:
        """Return the usage that the client sees. Replayed output tokens do not count as prompt tokens.

        reloaded_tokens: at most so many of the cached ones, the last, came from each slower tier.
        """
        left = min(num_cached_tokens, self._job.num_prompt_tokens)
        by_tier: dict[str, int] = {}
        for tier, count in reloaded_tokens.items():
            by_tier[tier.value] = min(left, count)
            left -= by_tier[tier.value]
        by_tier[Tier.DEVICE.value] = left
        return Usage(
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_cached_tokens={tier: count for tier, count in by_tier.items() if count},
        )


class ComputingLeg(Leg):
    """A leg that computes the prompt on this worker.

    The leg first reloads what slower tiers have of the prompt's prefix. If the job names a `prefix_source`,
    it then pulls that prefix into the prefix cache. The engine finds both there. What fails is computed. A
    grammar is compiled before.
    """

    def __init__(self, job: PrefillJob | DecodeJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        source = job.prefix_source
        self._prefix_source = None if source is None or source.worker.worker_id == parts.worker.worker_id else source
        self.reads_from_peer = self._prefix_source is not None
        self._preparation: asyncio.Task[None] | None = None
        self._reloaded_tokens: Mapping[Tier, int] = NOTHING_RELOADED
        self._admitted_s = self._started_s

    @abstractmethod
    def _engine_request(self) -> SequenceRequest:
        """Build the engine request for the samples that are still open."""

    def begin(self) -> None:
        reloads = self._parts.reloads
        may_reload = reloads is not None and reloads.plan(self._usable_hashes, uses_disk=self._uses_disk) is not None
        if self._prefix_source is None and not may_reload and not self._job.sampling.is_constrained:
            self._join_queue()
        else:
            # Refuse an invalid request now rather than after the pull.
            self._parts.engine.engine.check_request(self._engine_request())
            self.is_preparing = True
            self._preparation = self._parts.tasks.start(self._prepare_and_join(), name=f"prepare-{self._job.job}")

    def admitted(self, admission: AdmittedSequence) -> None:
        self._admitted_s = self._loop.time()

    async def _prepare_and_join(self) -> None:
        failure: Failure | None = None
        try:
            await self._prepare_rules()
            await self._reload()
            if self._prefix_source is not None:
                await self._pull_prefix(self._prefix_source)
            if not self.has_ended:
                self._join_queue()
        except Refused as refused:  # by the grammar, or because the queue is full now or the worker shuts down
            failure = refused.failure
        except Exception as error:  # a bug in Baton fails only this request
            log.exception("preparation_failed", job=str(self._job.job))
            message = f"the request could not be prepared: {type(error).__name__}"
            failure = Failure(code=Code.INTERNAL, reason=Reason.INTERNAL, message=message)
        self._preparation, self.is_preparing = None, False
        if failure is not None:
            self.stop(failure)

    @property
    def _usable_hashes(self) -> Sequence[BlockHash]:
        """Hashes of the leading blocks that may come from a cache: the last token is always computed, and
        every token whose logprobs are reported."""
        if self._job.sampling.num_prompt_logprobs is not None:
            return ()
        return self._hashes[: max_cached_blocks(len(self._job.token_ids), self._parts.block_size_tokens)]

    @property
    def _uses_disk(self) -> bool:
        """False if a prefix is pulled: the scheduler found that faster than the disk."""
        return self._prefix_source is None

    async def _reload(self) -> None:
        if self._parts.reloads is not None:
            by_tier = await self._parts.reloads.reload(
                self._usable_hashes, self._tenant_root, self._owned.owner, uses_disk=self._uses_disk
            )
            self._reloaded_tokens = {tier: count * self._parts.block_size_tokens for tier, count in by_tier.items()}

    async def _pull_prefix(self, source: PrefixSource) -> None:
        await self._parts.prefixes.pull(
            source,
            self._usable_hashes,
            cache_salt=self._job.cache_salt,
            tenant_root=self._tenant_root,
            owner=self._owned.owner,
            moving_session=self._moving_session if isinstance(self._job, DecodeJob) else None,
            trace_context=self._job.trace_context,
        )

    @property
    def _moving_session(self) -> SessionKey | None:
        """The session that goes on where it is decoded; None if its KV at other workers is kept."""
        return self._job.hints.key if self._parts.moves_sessions else None

    def _join_queue(self) -> None:
        self._parts.engine.add(self._engine_request())
        self._output.counted()

    def _release(self, failure: Failure) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
        self._parts.engine.cancel(self.seq_id)


def logprobs_of(tokens: Sequence[SampledToken]) -> tuple[TokenLogprobs, ...]:
    """Return one entry per token, or an empty tuple if the request did not ask for logprobs."""
    return tuple(token.logprobs for token in tokens if token.logprobs is not None)


@lru_cache(maxsize=1024)
def chain_root(model_fingerprint: str, cache_salt: bytes, block_size_tokens: int) -> BlockHash:
    """Return the parent hash of a prompt's first block.

    Workers compute hashes from tokens and salt themselves. They never trust hashes in a job.
    """
    return root_hash(model_fingerprint=model_fingerprint, cache_salt=cache_salt, block_size_tokens=block_size_tokens)


@lru_cache(maxsize=1024)
def chain_tenant(model_fingerprint: str, cache_salt: bytes, block_size_tokens: int) -> BlockHash:
    """Return the hash that stands for the tenant of a prompt's blocks."""
    return tenant_root(model_fingerprint=model_fingerprint, cache_salt=cache_salt, block_size_tokens=block_size_tokens)
