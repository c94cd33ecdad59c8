"""A prefill leg: compute the prompt, announce its blocks to the reader as they become ready, sample the first tokens, end.

Where another worker holds the prompt's beginning and was named for it, that is pulled first, if it can be; the engine then finds it in its
cache. The transfer outlives the leg: its blocks stay pinned until the reader has released them or its lease has ended.
"""

import asyncio

from baton.core.errors import Failure, Refused
from baton.core.jobs import PrefillJob, PrefixSource
from baton.core.peer import FirstToken
from baton.core.request import LegTimeline
from baton.engine.outcome import Admission, Progress, SequenceOutput
from baton.engine.sequence import SequenceRequest, max_cached_blocks
from baton.worker.leg import Leg, LegOutput, LegParts


class PrefillLeg(Leg):
    """Ends with the first token of its last sample."""

    def __init__(self, job: PrefillJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self._reader = job.reader
        source = job.prefix_source
        self._prefix_source = None if source is None or source.worker.worker_id == parts.worker.worker_id else source
        self._bringing: asyncio.Task[None] | None = None
        self._admitted_s = self._started_s
        self._first_tokens: list[FirstToken] = []

    def begin(self) -> None:
        if self._prefix_source is None:
            self._join_queue()
        else:
            self._parts.engine.engine.check_request(self._prefill_request())  # refused now rather than when the prefix is here
            self.is_following = True
            self._bringing = self._parts.tasks.start(self._bring(self._prefix_source), name=f"prefix-{self._job.job}")
        if self._reader is not None:
            self._parts.owner.born(self._job.job, self._reader)

    async def _bring(self, source: PrefixSource) -> None:
        usable = self._hashes[: max_cached_blocks(len(self._job.token_ids), self._parts.block_size_tokens)]
        await self._parts.prefixes.bring(source, usable, cache_salt=self._job.cache_salt)
        self._bringing, self.is_following = None, False
        if self.has_ended:
            return
        try:
            self._join_queue()
        except Refused as refused:  # the queue is full by now, or the worker leaves
            self.stop(refused.failure)

    def _join_queue(self) -> None:
        self._parts.engine.add(self._prefill_request())
        self._output.counted()

    def _prefill_request(self) -> SequenceRequest:
        return self._request(prefill_only=True, for_reader=self._reader is not None)

    def admitted(self, admission: Admission) -> None:
        self._admitted_s = self._loop.time()
        if self._reader is not None:
            self._parts.owner.allocated(self._job.job, admission.block_table, self._hashes)
            if admission.num_cached_blocks:
                self._announce(admission.num_cached_blocks * self._parts.block_size_tokens)

    def progressed(self, progress: Progress) -> None:
        if progress.num_computed_tokens < len(
            self._job.token_ids
        ):  # the prompt's end is announced with its first tokens, if they are sound
            self._announce(progress.num_computed_tokens)

    def _take(self, output: SequenceOutput, *, is_last: bool) -> None:
        token = output.tokens[0]
        self._first_tokens.append(
            FirstToken(sample_index=output.sample_index, token_id=token.token_id, logprobs=token.logprobs, finish=output.finish)
        )
        if not is_last:
            self._say(output)
            return
        timeline = self._timeline(output.num_cached_tokens)
        self._announce(len(self._job.token_ids), timeline)
        self._say(output, usage=self._usage(output.num_cached_tokens), timeline=timeline)

    def _ends_sample(self, output: SequenceOutput) -> bool:
        return True

    def _release(self, failure: Failure) -> None:
        if self._bringing is not None:
            self._bringing.cancel()
        self._parts.engine.cancel(self.seq_id)
        if self._reader is not None:
            self._parts.owner.lost(self._job.job, failure.reason)

    def _announce(self, num_computed_tokens: int, timeline: LegTimeline | None = None) -> None:
        """With the leg's `timeline` it is the final announcement."""
        if self._reader is None:
            return
        if timeline is None:
            self._parts.owner.announce(self._job.job, num_computed_tokens)
        else:
            self._parts.owner.announce(self._job.job, num_computed_tokens, final=True, first_tokens=self._first_tokens, timeline=timeline)

    def _timeline(self, num_cached_tokens: int) -> LegTimeline:
        return LegTimeline(
            worker_id=self._parts.worker.worker_id,
            pid=self._parts.pid,
            queue_s=self._admitted_s - self._started_s,
            compute_s=self._loop.time() - self._admitted_s,
            num_computed_tokens=len(self._job.token_ids) - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
        )
