"""The decode leg that pulls the prompt's KV from the prefill worker.

1. Send Follow to the owner immediately.
2. At the first KvReady, queue for memory in the engine.
3. Once blocks are allocated, read the owner's blocks into them.
4. When the last block is validated, join the running batch.

The first delta repeats the first token, so no token is lost if the owner dies after its last KvReady.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from baton.core.errors import Code, Failure, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import BlockHash, num_blocks_for
from baton.core.kv.kv_tables import entries_from, hashes_of_entries
from baton.core.messages.jobs import DecodeJob
from baton.core.messages.peer_messages import FirstToken
from baton.core.request import LegTimeline, Usage
from baton.engine.state.outcome import AdmittedSequence, SequenceOutput
from baton.engine.state.sequence import max_cached_blocks
from baton.engine.state.step import SampledToken
from baton.runtime.logging import get_logger
from baton.transfer.reader.pull import Pull
from baton.transfer.reader.pull_record import PullResult
from baton.worker.jobs.decode_leg import DecodeLeg
from baton.worker.jobs.leg import LegOutput, LegParts

log = get_logger(__name__)


class PulledDecodeLeg(DecodeLeg):
    """Pulls KV from `owner`, then decodes.

    If all samples end with their first token, the leg ends without reading. A failed pull ends the job with a
    retriable failure that blames the owner; the gateway then places the request again.
    """

    def __init__(self, job: DecodeJob, owner: WorkerRef, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self.is_preparing = self.reads_from_peer = True  # until the first KvReady
        self._owner = owner
        self._pull: Pull | None = None
        self._has_sent_prompt = False
        self._result: PullResult | None = None
        self._num_cached_tokens = 0
        self._received_s = 0.0
        self._admission_s: float | None = None
        self._admission_timeout: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        # Refuse an invalid request now rather than when the KV is ready.
        self._parts.engine.engine.check_request(self._request(pulled=True))
        usable = max_cached_blocks(len(self._job.token_ids), self._parts.block_size_tokens)
        if self._parts.reloads is not None:  # what has arrived when blocks are allocated need not be pulled
            self._parts.reloads.start(self._hashes[:usable], self._tenant_root, self._owned.owner)
        self._pull = self._parts.reader.pull(
            self._owner,
            self._job.job,
            have_blocks=self._parts.pool.count_cached(self._needed_hashes(usable)),
            expected=self._needed_hashes(len(self._hashes)),
            trace_context=self._job.trace_context,
        )
        self._parts.tasks.start(self._pull_and_join(self._pull), name=f"pull-{self._job.job}")

    def _needed_hashes(self, num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the prompt's first blocks that are seen after it, over all block tables."""
        windows, num_tokens = self._parts.pool.windows, len(self._job.token_ids)
        entries = entries_from(windows.first_blocks(num_tokens), num_blocks_for(num_tokens, windows.block_size_tokens))
        return hashes_of_entries(self._hashes[:num_blocks], entries, windows.num_tables)

    def admitted(self, admission: AdmittedSequence) -> None:
        self._cancel_admission_timeout()
        self._output.counted()
        self._num_cached_tokens = admission.num_cached_blocks * self._parts.block_size_tokens
        have_blocks = len(admission.cached_block_ids)
        if self._pull is not None:
            self._pull.receive_into(dict(enumerate(admission.receiving_block_ids, have_blocks)), have_blocks)

    async def _pull_and_join(self, pull: Pull) -> None:
        try:
            await self._prepare_rules()
            await pull.first_ready()
            if not self._end_all_samples(pull.first_tokens):
                self._queue_for_memory()
            first_tokens = await pull.announced()
            if self._end_all_samples(first_tokens):
                self._end_with(first_tokens, pull)
                return
            self._result = await pull.done()
            self._received_s = self._loop.time()
            self._join_batch(first_tokens)
        except Refused as refused:
            self.stop(refused.failure)
        except Exception as error:  # a bug in Baton fails only this request, and not as a failed pull
            log.exception("pulled_decode_failed", job=str(self._job.job))
            self.stop(
                Failure(
                    code=Code.INTERNAL, reason=Reason.INTERNAL, message=f"pulling the KV failed: {type(error).__name__}"
                )
            )

    def _queue_for_memory(self) -> None:
        self.is_preparing = False
        if self.has_ended:
            return
        self._parts.engine.add(self._request(pulled=True))
        wait_s = self._parts.pull_wait_s
        self._admission_timeout = self._loop.call_later(wait_s, self.stop, _no_free_blocks(wait_s))

    def _end_all_samples(self, first_tokens: Sequence[FirstToken] | None) -> bool:
        """Return True if every open sample has ended with its first token."""
        finished = {token.sample_index for token in first_tokens or () if token.finish is not None}
        return first_tokens is not None and self._open_samples <= finished

    def _end_with(self, first_tokens: Sequence[FirstToken], pull: Pull) -> None:
        """Send the first tokens, which end all samples, and leave the engine's queue."""
        self._cancel_admission_timeout()
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
        """Add the sequence to the running batch.

        Samples without a first token were cancelled at the owner.
        """
        missing = self._open_samples - {token.sample_index for token in first_tokens}
        if missing:
            self.cancel(tuple(missing), Reason.CANCELLED)
        if not self.has_ended:
            self._parts.engine.received(
                self.seq_id, [_sampled(t) for t in first_tokens if t.sample_index in self._open_samples]
            )

    def _send_output(self, output: SequenceOutput, *, is_last: bool) -> None:
        if self._admission_s is None and self._is_from_decode_step(output):
            self._admission_s = max(0.0, self._parts.engine.last_step_started_s - self._received_s)
        super()._send_output(self._with_prompt_logprobs(output), is_last=is_last)

    def _with_prompt_logprobs(self, output: SequenceOutput) -> SequenceOutput:
        """Add the prefill leg's logprobs of the prompt to the first output, because that leg's own message
        may arrive late or never."""
        final = self._pull.final if self._pull is not None else None
        if self._has_sent_prompt or final is None:
            return output
        self._has_sent_prompt = True
        found = (first.prompt_logprobs for first in final.first_tokens if first.prompt_logprobs is not None)
        return replace(output, prompt_logprobs=next(found, output.prompt_logprobs))

    def _owner_timeline(self) -> LegTimeline | None:
        """Return the prefill leg's timeline.

        It is repeated because the prefill leg's own message may arrive late or never.
        """
        final = self._pull.final if self._pull is not None else None
        return final.timeline if final is not None else None

    def _first_usage(self, output: SequenceOutput) -> Usage | None:
        """Return the usage of the prefill leg: its cached tokens are those that the client did not wait
        for."""
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
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    def _release(self, failure: Failure) -> None:
        self._cancel_admission_timeout()
        self._parts.engine.cancel(self.seq_id)
        if self._pull is not None:
            self._pull.cancel()

    def _cancel_admission_timeout(self) -> None:
        if self._admission_timeout is not None:
            self._admission_timeout.cancel()
            self._admission_timeout = None


def _sampled(token: FirstToken) -> SampledToken:
    return SampledToken(sample_index=token.sample_index, token_id=token.token_id, logprobs=token.logprobs)


def _no_free_blocks(waited_s: float) -> Failure:
    return Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason=Reason.NO_FREE_BLOCKS,
        message=f"no KV blocks became free within {waited_s:g} s; place the request on another decode worker",
        retriable=True,
    )
