"""What a prefill and a decode leg share: one job's work on this worker, from its receipt to its one last
message."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash, chain, root_hash
from baton.core.kv.kv_events import Tier
from baton.core.messages.jobs import DecodeJob, Job, PrefillJob, PrefixSource
from baton.core.request import LegTimeline, TokenDelta, TokenLogprobs, Usage
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.loop import EngineLoop
from baton.engine.state.outcome import AdmittedSequence, PrefillProgress, SequenceOutput
from baton.engine.state.sequence import SequenceRequest, max_cached_blocks
from baton.engine.state.step import SampledToken
from baton.runtime.observability.tracing import OFF, Tracing
from baton.transfer.owner.owner_service import OwnerService
from baton.transfer.reader.kv_reader import KvReader
from baton.worker.background_tasks import BackgroundTasks
from baton.worker.jobs.prefix_puller import PrefixPuller


@dataclass(frozen=True, slots=True, kw_only=True)
class LegParts:
    """What every leg works with."""

    worker: WorkerRef
    pid: int
    engine: EngineLoop
    pool: BlockPool
    owner: OwnerService
    reader: KvReader
    prefixes: PrefixPuller
    tasks: BackgroundTasks
    model_fingerprint: str
    sampler_version: int
    block_size_tokens: int
    handoff_wait_s: float
    tracing: Tracing = OFF


class LegOutput(Protocol):
    """Where a leg speaks. It says exactly one last thing: a delta with `is_last`, or a failure."""

    def delta(self, delta: TokenDelta, *, is_last: bool) -> None: ...

    def fail(self, failure: Failure) -> None: ...

    def counted(self) -> None:
        """From now on this worker's own numbers contain the job, so that a scheduler may drop its
        reservation."""
        ...


class Leg(ABC):
    """One job. `seq_id` names its sequence in the engine; `admitted`, `progressed` and `produced` bring what
    the engine did with it."""

    def __init__(self, job: Job, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        self.seq_id = seq_id
        self.has_ended = False
        self.is_following = False
        """It waits for another worker's KV; the engine does not know of it yet."""
        self._job = job
        self.num_output_tokens = 0
        """Made here, of the samples that have ended."""
        self._open_samples = set(job.sample_indices)
        self._parts = parts
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._root = chain_root(parts.model_fingerprint, job.cache_salt, parts.block_size_tokens)
        self._hashes = tuple(chain(self._root, job.token_ids, parts.block_size_tokens))

    @abstractmethod
    def begin(self) -> None:
        """Start the work. Raises Refused when the worker cannot take it."""

    @abstractmethod
    def admitted(self, admission: AdmittedSequence) -> None:
        """The engine gave the sequence its blocks."""

    @abstractmethod
    def _take(self, output: SequenceOutput, *, is_last: bool) -> None:
        """New tokens of an open sample; the job ends with them if `is_last`."""

    @abstractmethod
    def _ends_sample(self, output: SequenceOutput) -> bool:
        """Whether this worker's part of the sample is over."""

    @abstractmethod
    def _release(self, failure: Failure) -> None:
        """Give back what the leg holds in engine and transfers; called once, when it ends before its work is
        done."""

    def progressed(self, progress: PrefillProgress) -> None:  # noqa: B027 - only a prefill leg announces
        """A step has computed part of the prompt."""

    def produced(self, output: SequenceOutput) -> None:
        """New tokens of one sample, or the sequence's failure. A step that was under way may still bring
        those of a cancelled sample."""
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
        self._take(output, is_last=self.has_ended)

    def cancel(self, sample_indices: Sequence[int], reason: Reason) -> None:
        """End these samples, or all (empty). When none is left the job ends; repeated cancels change
        nothing."""
        if self.has_ended:
            return
        cancelled = self._open_samples & set(sample_indices) if sample_indices else set(self._open_samples)
        self._open_samples -= cancelled
        if not self._open_samples:
            self.stop(Failure(code=Code.CANCELLED, reason=reason, message=f"the job was cancelled: {reason.value}"))
        elif cancelled:
            self._parts.engine.cancel(self.seq_id, tuple(sorted(cancelled)))

    def stop(self, failure: Failure) -> None:
        """End the job with this failure, unless it has ended."""
        if self.has_ended:
            return
        self.has_ended = True
        self._release(failure)
        self._output.fail(failure)

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
            sample_indices=tuple(sorted(self._open_samples)),
            priority=self._job.priority,
            tpot_slo_s=self._job.tpot_slo_s,
            prefill_only=prefill_only,
            for_reader=for_reader,
            pulled=pulled,
        )

    def _say(self, output: SequenceOutput, *, usage: Usage | None = None, timeline: LegTimeline | None = None) -> None:
        delta = TokenDelta(
            job=self._job.job,
            sample_index=output.sample_index,
            output_index=output.output_index,
            token_ids=tuple(token.token_id for token in output.tokens),
            logprobs=logprobs_of(output.tokens),
            finish=output.finish,
            usage=usage,
            timeline=timeline,
        )
        self._output.delta(delta, is_last=self.has_ended)

    def _usage(self, num_cached_tokens: int) -> Usage:
        """Outputs that are replayed are no prompt tokens to the client."""
        cached = min(num_cached_tokens, self._job.num_prompt_tokens)
        return Usage(
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_cached_tokens={Tier.DEVICE.value: cached} if cached else {},
        )


class ComputingLeg(Leg):
    """A leg that computes the prompt here. Where another worker holds the prompt's beginning and was named
    for it, that is pulled first, if it can be; the engine then finds it in its cache."""

    def __init__(self, job: PrefillJob | DecodeJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        source = job.prefix_source
        self._prefix_source = None if source is None or source.worker.worker_id == parts.worker.worker_id else source
        self._bringing: asyncio.Task[None] | None = None
        self._admitted_s = self._started_s

    @abstractmethod
    def _engine_request(self) -> SequenceRequest:
        """What the engine is asked for, of the samples that are still wanted."""

    def begin(self) -> None:
        if self._prefix_source is None:
            self._join_queue()
        else:
            self._parts.engine.engine.check_request(
                self._engine_request()
            )  # refused now rather than when the prefix is here
            self.is_following = True
            self._bringing = self._parts.tasks.start(self._bring(self._prefix_source), name=f"prefix-{self._job.job}")

    def admitted(self, admission: AdmittedSequence) -> None:
        self._admitted_s = self._loop.time()

    async def _bring(self, source: PrefixSource) -> None:
        usable = self._hashes[: max_cached_blocks(len(self._job.token_ids), self._parts.block_size_tokens)]
        await self._parts.prefixes.bring(
            source, usable, cache_salt=self._job.cache_salt, trace_context=self._job.trace_context
        )
        self._bringing, self.is_following = None, False
        if self.has_ended:
            return
        try:
            self._join_queue()
        except Refused as refused:  # the queue is full by now, or the worker leaves
            self.stop(refused.failure)

    def _join_queue(self) -> None:
        self._parts.engine.add(self._engine_request())
        self._output.counted()

    def _release(self, failure: Failure) -> None:
        if self._bringing is not None:
            self._bringing.cancel()
        self._parts.engine.cancel(self.seq_id)


def logprobs_of(tokens: Sequence[SampledToken]) -> tuple[TokenLogprobs, ...]:
    """One entry a token, or none at all where the request did not ask."""
    return tuple(token.logprobs for token in tokens if token.logprobs is not None)


@lru_cache(maxsize=1024)
def chain_root(model_fingerprint: str, cache_salt: bytes, block_size_tokens: int) -> BlockHash:
    """The parent of a prompt's first block. Workers hash for themselves: a block asked for by hash is what
    the tokens and the salt say."""
    return root_hash(model_fingerprint=model_fingerprint, cache_salt=cache_salt, block_size_tokens=block_size_tokens)
