"""A decode leg that takes the prompt's KV over from the worker that computed it.

Follow at once; at the first KvReady join the engine's queue for memory; with the blocks, read; when the last
one is proven, join the batch. The first delta repeats the first token, so the owner may die once its last
KvReady is out.
"""

import asyncio
from collections.abc import Sequence

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.messages.jobs import DecodeJob
from baton.core.messages.peer_messages import FirstToken
from baton.core.request import LegTimeline, Usage
from baton.engine.state.outcome import AdmittedSequence, SequenceOutput
from baton.engine.state.sequence import max_cached_blocks
from baton.engine.state.step import SampledToken
from baton.runtime.logging import get_logger
from baton.transfer.reader.pull import Pull, PullResult
from baton.worker.jobs.decode_leg import DecodeLeg
from baton.worker.jobs.leg import LegOutput, LegParts

log = get_logger(__name__)


class PulledDecodeLeg(DecodeLeg):
    """Ends early, and gives its place back, when the first tokens are the last. A pull that fails is reported
    with its owner blamed: the gateway places again, this worker decides nothing."""

    def __init__(self, job: DecodeJob, owner: WorkerRef, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self.is_following = True  # until the first KvReady
        self._owner = owner
        self._pull: Pull | None = None
        self._result: PullResult | None = None
        self._num_cached_tokens = 0
        self._received_s = 0.0
        self._admission_s: float | None = None
        self._room: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._parts.engine.engine.check_request(
            self._request(pulled=True)
        )  # refused now rather than when the KV is ready
        usable = self._hashes[: max_cached_blocks(len(self._job.token_ids), self._parts.block_size_tokens)]
        self._pull = self._parts.reader.pull(
            self._owner,
            self._job.job,
            have_blocks=self._parts.pool.count_cached(usable),
            expected=self._hashes,
            trace_context=self._job.trace_context,
        )
        self._parts.tasks.start(self._take_over(self._pull), name=f"handoff-{self._job.job}")

    def admitted(self, admission: AdmittedSequence) -> None:
        self._stop_waiting()
        self._output.counted()
        self._num_cached_tokens = admission.num_cached_blocks * self._parts.block_size_tokens
        receiving = dict(enumerate(admission.receiving_block_ids, admission.num_cached_blocks))
        if self._pull is not None:
            self._pull.receive_into(receiving, admission.num_cached_blocks)

    async def _take_over(self, pull: Pull) -> None:
        try:
            await pull.first_ready()
            if not self._are_last(pull.first_tokens):
                self._wait_for_room()
            first_tokens = await pull.announced()
            if self._are_last(first_tokens):
                self._end_with(first_tokens, pull)
                return
            self._result = await pull.done()
            self._received_s = self._loop.time()
            self._join_batch(first_tokens)
        except Refused as refused:
            self.stop(refused.failure)
        except Exception as error:  # a bug of ours costs this one request, and is told apart from a pull that failed
            log.exception("handoff_failed", job=str(self._job.job))
            self.stop(
                Failure(
                    code=Code.INTERNAL, reason=Reason.INTERNAL, message=f"the handoff failed: {type(error).__name__}"
                )
            )

    def _wait_for_room(self) -> None:
        self.is_following = False
        if self.has_ended:
            return
        self._parts.engine.add(self._request(pulled=True))
        self._room = self._loop.call_later(self._parts.handoff_wait_s, self.stop, _no_room(self._parts.handoff_wait_s))

    def _are_last(self, first_tokens: Sequence[FirstToken] | None) -> bool:
        """Whether every sample that is still wanted has ended with its first token."""
        finished = {token.sample_index for token in first_tokens or () if token.finish is not None}
        return first_tokens is not None and self._open_samples <= finished

    def _end_with(self, first_tokens: Sequence[FirstToken], pull: Pull) -> None:
        """Nothing is left to generate: repeat the first tokens and give the place back."""
        self._stop_waiting()
        self._parts.engine.cancel(self.seq_id)
        pull.cancel()
        for token in first_tokens:
            self.produced(
                SequenceOutput(
                    seq_id=self.seq_id,
                    sample_index=token.sample_index,
                    output_index=len(self._job.token_ids) - self._job.num_prompt_tokens,
                    tokens=(_sampled(token),),
                    finish=token.finish,
                )
            )

    def _join_batch(self, first_tokens: Sequence[FirstToken]) -> None:
        """A sample without a first token was cancelled at the owner; our own Cancel is under way."""
        missing = self._open_samples - {token.sample_index for token in first_tokens}
        if missing:
            self.cancel(tuple(missing), Reason.CANCELLED)
        if not self.has_ended:
            self._parts.engine.received(
                self.seq_id, [_sampled(t) for t in first_tokens if t.sample_index in self._open_samples]
            )

    def _take(self, output: SequenceOutput, *, is_last: bool) -> None:
        if self._admission_s is None and self._is_of_a_decode_step(output):
            self._admission_s = max(0.0, self._parts.engine.last_step_started_s - self._received_s)
        super()._take(output, is_last=is_last)

    def _owner_timeline(self) -> LegTimeline | None:
        """The prefill leg tells, too; but its message may come after our last, or never."""
        final = self._pull.final if self._pull is not None else None
        return final.timeline if final is not None else None

    def _usage_of(self, output: SequenceOutput) -> Usage | None:
        """As the prefill leg tells it: what came from a cache there is what the client did not wait for."""
        timeline = self._owner_timeline()
        return self._usage(timeline.num_cached_tokens) if timeline is not None else None

    def _timeline(self, decode_s: float) -> LegTimeline:
        result = self._result
        return LegTimeline(
            worker_id=self._parts.worker.worker_id,
            pid=self._parts.pid,
            num_cached_tokens=self._num_cached_tokens,
            kv_wait_s=result.kv_wait_s if result else None,
            kv_transfer_s=result.kv_transfer_s if result else None,
            kv_exposed_s=result.kv_exposed_s if result else None,
            kv_exposed_wait_s=result.kv_exposed_wait_s if result else None,
            kv_admission_s=self._admission_s,
            kv_bytes=result.transfer_bytes if result else 0,
            kv_early_bytes=result.early_bytes if result else 0,
            transport=result.transport if result else "",
            first_decode_s=self._first_decode_s,
            decode_s=decode_s,
        )

    def _release(self, failure: Failure) -> None:
        self._stop_waiting()
        self._parts.engine.cancel(self.seq_id)
        if self._pull is not None:
            self._pull.cancel()

    def _stop_waiting(self) -> None:
        if self._room is not None:
            self._room.cancel()
            self._room = None


def _sampled(token: FirstToken) -> SampledToken:
    return SampledToken(sample_index=token.sample_index, token_id=token.token_id, logprobs=token.logprobs)


def _no_room(waited_s: float) -> Failure:
    return Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason=Reason.NO_FREE_BLOCKS,
        message=f"no memory for this request's KV within {waited_s:g} s; place it on another decode worker",
        retriable=True,
    )
