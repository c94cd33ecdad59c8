"""Computes the numbers of one worker from the scheduler's view of it."""

from collections.abc import Sequence
from math import ceil, inf

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.worker_report import TierReport, WorkerState
from baton.core.kv.kv_events import Tier
from baton.scheduler.state.shared_steps import longest_step_s, prefill_share
from baton.scheduler.state.worker_data import MEASURED_COSTS, NO_COSTS, DerivedState, ReportedState, ReservedState
from baton.scheduler.state.worker_links import ExpectedLink

DEFAULT_CHUNK_TOKENS = 512
"""Assumed `max_num_batched_tokens` of a worker that does not report it."""
MAX_PREFILL_SHARE = 0.95
"""Upper limit of a reported share of step time that went to prompts."""
MAX_TOKENS_PER_STEP = 16.0
"""Upper limit of the reported tokens of a step. A draft has fewer."""
DEFAULT_OUTPUT_TOKENS = 128
"""Assumed mean answer length of a worker where no sequence has ended yet."""

_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""


def reported_state(view: WorkerView, kv_group: int, link: ExpectedLink) -> ReportedState[float]:
    """Return the numbers of a worker's report. Its step costs are 0 if it reported none that are usable."""
    report = view.report
    role, layout, is_ready = report.role, report.layout, report.state is WorkerState.READY
    total_blocks = view.longest_sequence_blocks(report.blocks.total)
    max_tokens = total_blocks * layout.block_size_tokens if is_ready else 0
    decoding_seqs = report.running_seqs if role.can_decode else 0
    decoding_context_tokens = report.running_context_tokens if role.can_decode else 0
    has_mean = 1 <= report.mean_output_tokens < inf
    costs = report.costs if report.costs is not None and report.costs.is_usable else None
    reported: ReportedState[float] = ReportedState(
        kv_group=kv_group,
        is_ready=is_ready,
        can_prefill=role.can_prefill,
        block_size_tokens=layout.block_size_tokens,
        total_blocks=total_blocks,
        max_prefill_tokens=max_tokens if role.can_prefill else 0,
        max_decode_tokens=max_tokens if role.can_decode else 0,
        decoding_seqs=decoding_seqs,
        decoding_context_tokens=decoding_context_tokens,
        joining_seqs_unknown=0 if decoding_seqs else report.waiting_seqs,
        max_chunk_tokens=max(1, (report.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS) - decoding_seqs),
        target_step_s=report.target_step_s,
        max_num_seqs=report.max_num_seqs,
        mean_output_tokens=report.mean_output_tokens if has_mean else DEFAULT_OUTPUT_TOKENS,
        recent_prefill_share=min(report.recent_prefill_share, MAX_PREFILL_SHARE),
        evicted_reuse=report.evicted_reuse,
        tokens_per_step=min(max(1.0, report.tokens_per_step), MAX_TOKENS_PER_STEP),
        ttft_factor=report.target_factors.ttft,
        tpot_factor=report.target_factors.tpot,
        default_link_s_per_byte=link.s_per_byte,
        default_link_exposed_s=link.exposed_s,
        host_reload_s_per_byte=_reload_s_per_byte(report.tiers, Tier.HOST),
        disk_reload_s_per_byte=_reload_s_per_byte(report.tiers, Tier.DISK),
        host_reload_start_s=_reload_start_s(report.tiers, Tier.HOST),
        disk_reload_start_s=_reload_start_s(report.tiers, Tier.DISK),
        cost_source=NO_COSTS,
        mixed_decode_s=0.0,
        base_step_s=0.0,
        prefill_token_s=0.0,
        prefill_attended_s=0.0,
        decode_step_s=0.0,
        decode_seq_s=0.0,
        decode_context_s=0.0,
        mixed_to_decode_ratio=0.0,
    )
    if costs is None:
        return reported
    prefill_factor = costs.mixed_factor if decoding_seqs else costs.prefill_factor
    decode_s = costs.decode_seq_s * decoding_seqs + costs.decode_context_s * decoding_context_tokens
    reported.cost_source = MEASURED_COSTS
    reported.mixed_decode_s = decode_s * prefill_factor
    reported.base_step_s = costs.step_s * prefill_factor
    reported.prefill_token_s = costs.prefill_token_s * prefill_factor
    reported.prefill_attended_s = costs.prefill_attended_s * prefill_factor
    reported.decode_step_s = costs.step_s * costs.decode_factor
    reported.decode_seq_s = costs.decode_seq_s * costs.decode_factor
    reported.decode_context_s = costs.decode_context_s * costs.decode_factor
    reported.mixed_to_decode_ratio = prefill_factor / costs.decode_factor
    return reported


def _reload_s_per_byte(tiers: Sequence[TierReport], kind: Tier) -> float:
    """Return the reciprocal speed of a tier; 0 if it was not measured."""
    speeds = [tier.load_bytes_per_s for tier in tiers if tier.tier == kind.value and tier.load_bytes_per_s > 0]
    return max((1 / speed for speed in speeds), default=0.0)


def _reload_start_s(tiers: Sequence[TierReport], kind: Tier) -> float:
    """Return the time of a reload beyond its bytes: those under way, and the fixed time; 0 if not known."""
    of_kind = [tier for tier in tiers if tier.tier == kind.value]
    fixed_s = max((tier.load_overhead_s for tier in of_kind), default=0.0)
    return fixed_s + sum(tier.loading_bytes for tier in of_kind) * _reload_s_per_byte(tiers, kind)


def reserved_state(view: WorkerView) -> ReservedState[float]:
    """Return what a worker has left and what is queued there, own placements included."""
    report, free_blocks = view.report, view.longest_sequence_blocks(view.num_free_blocks)
    waiting_attended_tokens = report.waiting_prefill_attended_tokens or report.waiting_prefill_tokens**2 / (
        2 * max(1, report.waiting_seqs)
    )
    decodes = report.role.can_decode and report.running_seqs > 0
    mean_context_tokens = report.running_context_tokens / report.running_seqs if decodes else 0.0
    return ReservedState(
        free_blocks=free_blocks,
        free_tokens=free_blocks * report.layout.block_size_tokens,
        free_seqs=report.max_num_seqs - view.num_seqs,
        joining_seqs=report.waiting_seqs + view.reserved_seqs,
        joining_context_tokens=view.reserved_context_tokens + report.waiting_seqs * mean_context_tokens,
        queued_tokens=view.queued_prefill_tokens,
        queued_attended_tokens=waiting_attended_tokens + view.reserved_attended_tokens,
        tpot_slo_s=view.tpot_slo_s or 0.0,
    )


def derived_state(reported: ReportedState[float], reserved: ReservedState[float]) -> DerivedState[float]:
    """Predict the seconds of `DerivedState` for one worker.

    The age of an answer says little about its remaining length, so each decoding sequence is expected to run
    for another whole mean answer (`decode_drain_s`), in steps as long as `recent_prefill_share` makes them,
    which give `tokens_per_step`.
    """
    mixed_step_s = reported.base_step_s + reported.mixed_decode_s
    decode_s = (
        reported.decode_step_s
        + reported.decode_seq_s * reported.decoding_seqs
        + reported.decode_context_s * reported.decoding_context_tokens
    )
    queued_prefill_s = (
        reported.prefill_token_s * reserved.queued_tokens
        + reported.prefill_attended_s * reserved.queued_attended_tokens
    )
    joined_step_s, gap_s = _joined_step_s(reported, reserved)
    longest_s = longest_step_s(reported, joined_step_s, gap_s, reserved.tpot_slo_s)
    share = prefill_share(reported, joined_step_s, longest_s, reserved.tpot_slo_s, work_s=queued_prefill_s)
    num_steps = ceil(reserved.queued_tokens / reported.max_chunk_tokens)
    return DerivedState(
        mixed_step_s=mixed_step_s,
        queued_prefill_s=queued_prefill_s,
        joined_step_s=joined_step_s,
        longest_step_s=longest_s,
        decode_drain_s=reported.mean_output_tokens
        * max(decode_s / ((1 - reported.recent_prefill_share) * reported.tokens_per_step), _TINY_S),
        queue_s=max(num_steps * mixed_step_s + queued_prefill_s, queued_prefill_s / share),
    )


def _joined_step_s(reported: ReportedState[float], reserved: ReservedState[float]) -> tuple[float, float]:
    """Return `joined_step_s` and the TPOT of one answer on the idle worker.

    The joining sequences, pulled ones included, stand for the answers that begin before a new prompt is done.
    """
    seqs = reported.decoding_seqs + reserved.joining_seqs if reported.max_decode_tokens else 0
    if not seqs or not reported.prefill_token_s:
        return 0.0, 0.0
    context_tokens = reported.decoding_context_tokens + reserved.joining_context_tokens
    decode_s = reported.decode_step_s + reported.decode_seq_s * seqs + reported.decode_context_s * context_tokens
    gap_s = reported.decode_step_s + reported.decode_seq_s + reported.decode_context_s * context_tokens / seqs
    return decode_s * reported.mixed_to_decode_ratio, gap_s
