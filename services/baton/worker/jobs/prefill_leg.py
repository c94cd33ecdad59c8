"""The prefill leg: computes the prompt, announces its blocks to the reader, and samples the first tokens.

The transfer outlives the leg. Its blocks stay pinned until the reader releases them or its lease ends.
"""

from baton.core.errors import Failure
from baton.core.messages.jobs import PrefillJob
from baton.core.messages.peer_messages import FirstToken
from baton.core.request import LegTimeline
from baton.engine.state.outcome import AdmittedSequence, GrownSequence, PrefillProgress, SequenceOutput
from baton.engine.state.sequence import SequenceRequest
from baton.worker.jobs.leg import ComputingLeg, LegOutput, LegParts


class PrefillLeg(ComputingLeg):
    """Computes a prompt for another worker or for itself, and ends with the first token of its last
    sample."""

    def __init__(self, job: PrefillJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self._reader = job.reader
        self._first_tokens: list[FirstToken] = []

    def begin(self) -> None:
        super().begin()
        if self._reader is not None:
            self._parts.owner.create(self._job.job, self._reader, moving_session=self._moving_session)

    def _engine_request(self) -> SequenceRequest:
        return self._request(prefill_only=True, for_reader=self._reader is not None)

    def admitted(self, admission: AdmittedSequence) -> None:
        super().admitted(admission)
        if self._reader is not None:
            self._give_to_reader(admission.block_table)
            if admission.num_cached_blocks:
                self._announce(admission.num_cached_blocks * self._parts.block_size_tokens)

    def grown(self, growth: GrownSequence) -> None:
        if self._reader is not None:
            self._give_to_reader(growth.block_table)

    def _give_to_reader(self, block_table: tuple[int, ...]) -> None:
        """Pin the blocks that the reader needs to continue after the prompt."""
        first_blocks = self._parts.pool.windows.first_blocks(len(self._job.token_ids))
        self._parts.owner.allocated(self._job.job, block_table, self._hashes, first_blocks=first_blocks)

    def progressed(self, progress: PrefillProgress) -> None:
        # The last blocks are announced together with the first tokens, once these are known to be valid.
        if progress.num_computed_tokens < len(self._job.token_ids):
            self._announce(progress.num_computed_tokens)

    def _send_output(self, output: SequenceOutput, *, is_last: bool) -> None:
        token = output.tokens[0]
        self._first_tokens.append(
            FirstToken(
                sample_index=output.sample_index,
                token_id=token.token_id,
                logprobs=token.logprobs,
                finish=output.finish,
                prompt_logprobs=output.prompt_logprobs,
            )
        )
        if not is_last:
            self._send_delta(output)
            return
        timeline = self._timeline(output.num_cached_tokens)
        self._announce(len(self._job.token_ids), timeline)
        self._send_delta(output, usage=self._usage(output.num_cached_tokens, self._reloaded_tokens), timeline=timeline)

    def _ends_sample(self, output: SequenceOutput) -> bool:
        return True

    def _release(self, failure: Failure) -> None:
        super()._release(failure)
        if self._reader is not None:
            self._parts.owner.lost(self._job.job, failure.reason)

    def _announce(self, num_computed_tokens: int, timeline: LegTimeline | None = None) -> None:
        """Announce computed blocks to the reader, if there is one.

        With a `timeline` it is the final announcement.
        """
        if self._reader is None:
            return
        if timeline is None:
            self._parts.owner.announce(self._job.job, num_computed_tokens)
        else:
            self._parts.owner.announce(
                self._job.job, num_computed_tokens, final=True, first_tokens=self._first_tokens, timeline=timeline
            )

    def _timeline(self, num_cached_tokens: int) -> LegTimeline:
        return LegTimeline(
            worker_id=self._parts.worker.worker_id,
            pid=self._parts.pid,
            queue_s=self._admitted_s - self._started_s,
            compute_s=self._loop.time() - self._admitted_s,
            num_computed_tokens=len(self._job.token_ids) - num_cached_tokens,
            num_cached_tokens=num_cached_tokens,
        )
