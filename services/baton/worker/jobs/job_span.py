"""The trace span of one job on this worker, from its receipt to its last message."""

import asyncio

from baton.core.errors import Code, Failure
from baton.core.ids import WorkerRef
from baton.core.messages.jobs import DecodeJob, PrefillJob
from baton.core.request import LegTimeline
from baton.runtime.observability.tracing import Tracing

FINISHED = "finished"


class JobSpan:
    """A span named `prefill` or `decode`, child of the request's span.

    Pulls of the job are children of `context`.
    """

    def __init__(self, tracing: Tracing, job: PrefillJob | DecodeJob, worker: WorkerRef) -> None:
        self._job = job
        self._worker_id = worker.worker_id
        self._span = tracing.start("prefill" if isinstance(job, PrefillJob) else "decode", job.trace_context)
        self.context = self._span.context

    def end(self, timeline: LegTimeline | None, failure: Failure | None, *, num_output_tokens: int) -> None:
        """End the span.

        `timeline`: of the last delta, if the job ended with one; it may be the prefill worker's.
        """
        if not self._span.is_recorded:
            return
        job = self._job
        outcome = FINISHED if failure is None else failure.reason.value
        own = timeline if timeline is not None and timeline.worker_id == self._worker_id else None
        if own is not None:
            self._add_events(own)
        self._span.end(
            {
                "baton.request_id": job.job.request_id.hex(),
                "baton.attempt": job.job.attempt,
                "baton.outcome": outcome,
                "baton.prompt_tokens": job.num_prompt_tokens,
                "baton.replayed_tokens": len(job.token_ids) - job.num_prompt_tokens,
                "baton.samples": len(job.sample_indices),
                "baton.output_tokens": num_output_tokens,
                **({} if own is None else _seconds(own)),
            },
            problem="" if failure is None or failure.code is Code.CANCELLED else outcome,
        )

    def _add_events(self, own: LegTimeline) -> None:
        """Add events at the times that follow from the durations in `own`, counted back from now."""
        at_s = asyncio.get_running_loop().time()
        if own.decode_s is not None:
            at_s -= own.decode_s
            self._span.event("first token", at_s)
        if own.compute_s is not None:
            at_s -= own.compute_s
            self._span.event("admitted", at_s, {"baton.queue_s": own.queue_s})


def _seconds(own: LegTimeline) -> dict[str, float | None]:
    return {
        "baton.queue_s": own.queue_s,
        "baton.compute_s": own.compute_s,
        "baton.computed_tokens": own.num_computed_tokens,
        "baton.cached_tokens": own.num_cached_tokens,
        "baton.kv_wait_s": own.kv_wait_s,
        "baton.kv_exposed_s": own.kv_exposed_s,
        "baton.kv_admission_s": own.kv_admission_s,
        "baton.first_decode_s": own.first_decode_s,
        "baton.decode_s": own.decode_s,
    }
