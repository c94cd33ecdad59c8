"""Compares the predictions of placements with the outcomes that gateways report."""

from baton.core.cluster.placement import Placement
from baton.core.request import RequestActuals
from baton.runtime.observability.metrics import SchedulerMetrics
from baton.scheduler.state.cluster_state import ClusterState
from baton.scheduler.state.open_placements import OpenPlacement

FINISHED = "finished"
"""Outcome that a gateway reports for an attempt that was completed."""


class PredictionAccuracy:
    """Metrics of predicted and actual latencies and cached prefixes."""

    def __init__(self, metrics: SchedulerMetrics, state: ClusterState) -> None:
        """Create the comparison. `state` knows the reports of the workers."""
        self._metrics = metrics
        self._state = state
        self._prompt_tokens, self._predicted_cached_tokens, self._cached_tokens = map(
            metrics.prefix_tokens.labels, ("asked", "predicted", "actual")
        )

    def observe(self, ended: OpenPlacement, actuals: RequestActuals) -> None:
        """Compare a placement with its outcome. Prefixes are compared only if the attempt was completed."""
        self._compare_latency(ended.placement, actuals)
        if actuals.outcome == FINISHED:
            self._compare_prefix(ended, actuals)

    def _compare_latency(self, predicted: Placement, actuals: RequestActuals) -> None:
        """Observe predicted over actual TTFT and TPOT, on the worker that determines each."""
        predicted_ttft_s = predicted.ttft_s and predicted.ttft_s + predicted.waiting_s
        for term, worker, predicted_s, actual_s in (
            ("ttft", predicted.prefill or predicted.decode, predicted_ttft_s, actuals.ttft_s),
            ("tpot", predicted.decode or predicted.prefill, predicted.tpot_s, actuals.tpot_s),
        ):
            if predicted_s and actual_s and worker is not None and self._state.report_of(worker) is not None:
                self._metrics.predicted_over_actual.labels(term, worker.worker_id).observe(predicted_s / actual_s)

    def _compare_prefix(self, ended: OpenPlacement, actuals: RequestActuals) -> None:
        """Count the prompt tokens: all, those predicted to be cached or pulled, and those that were."""
        computing = ended.placement.prefill or ended.placement.decode
        report = self._state.report_of(computing) if computing is not None else None
        if report is None:
            return
        predicted_tokens = min(ended.num_prompt_tokens, ended.overlap_blocks * report.layout.block_size_tokens)
        self._prompt_tokens.inc(ended.num_prompt_tokens)
        self._predicted_cached_tokens.inc(predicted_tokens)
        self._cached_tokens.inc(actuals.num_cached_tokens)
