"""Decode legs: the base class, and the leg that computes the prompt on the decode worker itself."""

from abc import abstractmethod

from baton.core.messages.jobs import DecodeJob
from baton.core.request import LegTimeline, Usage
from baton.engine.state.outcome import AdmittedSequence, SequenceOutput
from baton.engine.state.sequence import SequenceRequest
from baton.worker.jobs.leg import ComputingLeg, Leg, LegOutput, LegParts


class DecodeLeg(Leg):
    """Generates all samples of a job, and ends with the `finish` of the last one.

    The first delta carries the timeline of the prefill worker if KV was pulled. The last delta carries the
    timeline of this leg, unless it is also the first one and carries the prefill worker's.
    """

    def __init__(self, job: DecodeJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._generating_since_s: float | None = None
        self._first_decode_s: float | None = None

    def _owner_timeline(self) -> LegTimeline | None:
        """Return the timeline of the worker that computed the prompt; None if it was computed here."""
        return None

    @abstractmethod
    def _first_usage(self, output: SequenceOutput) -> Usage | None:
        """Return the usage that the job's first delta carries."""

    @abstractmethod
    def _timeline(self, decode_s: float) -> LegTimeline:
        """Return the timeline of this leg, which has generated for `decode_s` seconds."""

    def _ends_sample(self, output: SequenceOutput) -> bool:
        return output.finish is not None

    def _send_output(self, output: SequenceOutput, *, is_last: bool) -> None:
        now_s = self._loop.time()
        if output.num_draft_tokens:
            self._num_draft_tokens += output.num_draft_tokens
            self._num_accepted_tokens += len(output.tokens) - 1
        self._num_preemptions += output.num_preemptions
        self._num_recomputed_tokens += output.num_recomputed_tokens
        if self._first_decode_s is None and self._is_from_decode_step(output):
            engine = self._parts.engine
            self._first_decode_s = engine.last_step_ended_s - engine.last_step_started_s
        if self._generating_since_s is None:
            self._generating_since_s = now_s
            usage, timeline = self._first_usage(output), self._owner_timeline()
        else:
            usage, timeline = None, None
        if is_last and timeline is None:
            timeline = self._timeline(now_s - self._generating_since_s)
        self._send_delta(output, usage=usage, timeline=timeline)

    def _is_from_decode_step(self, output: SequenceOutput) -> bool:
        """Return True unless `output` holds the first token, which a prefill step samples."""
        return output.output_index > len(self._job.token_ids) - self._job.num_prompt_tokens


class LocalDecodeLeg(ComputingLeg, DecodeLeg):
    """Computes prompt and answer on this worker, without a KV transfer."""

    def __init__(self, job: DecodeJob, seq_id: int, parts: LegParts, output: LegOutput) -> None:
        super().__init__(job, seq_id, parts, output)
        self._num_cached_tokens = 0

    def _engine_request(self) -> SequenceRequest:
        return self._request()

    def admitted(self, admission: AdmittedSequence) -> None:
        super().admitted(admission)
        self._num_cached_tokens = admission.num_cached_blocks * self._parts.block_size_tokens

    def _first_usage(self, output: SequenceOutput) -> Usage | None:
        return self._usage(output.num_cached_tokens, self._reloaded_tokens)

    def _timeline(self, decode_s: float) -> LegTimeline:
        first_token_s = self._loop.time() - decode_s
        return LegTimeline(
            worker_id=self._parts.worker.worker_id,
            pid=self._parts.pid,
            queue_s=self._admitted_s - self._started_s,
            compute_s=first_token_s - self._admitted_s,
            num_computed_tokens=len(self._job.token_ids) - self._num_cached_tokens,
            num_cached_tokens=self._num_cached_tokens,
            first_decode_s=self._first_decode_s,
            decode_s=decode_s,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )
