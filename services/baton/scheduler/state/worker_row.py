"""Computes the numbers of one worker from the scheduler's view of it."""

from dataclasses import replace
from math import ceil, inf

from baton.core.cluster.cluster_snapshot import WorkerView
from baton.core.cluster.worker_report import WorkerState
from baton.core.step_cost import MAX_PREFILL_SHARE, stall_free_step_s
from baton.scheduler.state.worker_data import MEASURED_COSTS, NO_COSTS, DerivedState, ReportedState, ReservedState

DEFAULT_CHUNK_TOKENS = 512
"""Assumed `max_num_batched_tokens` of a worker that does not report it."""
DEFAULT_OUTPUT_TOKENS = 128
"""Assumed mean answer length of a worker where no sequence has ended yet."""

_TINY_S = 1e-9
"""Shorter than any step. Avoids a division by zero for a worker whose costs are 0."""


def reported_state(view: WorkerView, kv_group: int, link_s_per_byte: float) -> ReportedState[float]:
    """Return the numbers of a worker's report. Its step costs are 0 if it reported none that are usable."""
    report = view.report
    role, layout = report.role, report.layout
    is_ready = report.state is WorkerState.READY
    max_tokens = report.blocks.total * layout.block_size_tokens if is_ready else 0
    decoding_seqs = report.running_seqs if role.can_decode else 0
    decoding_context_tokens = report.running_context_tokens if role.can_decode else 0
    has_mean = 1 <= report.mean_output_tokens < inf
    costs = report.costs if report.costs is not None and report.costs.is_usable else None
    reported: ReportedState[float] = ReportedState(
        kv_group=kv_group,
        is_ready=is_ready,
        can_prefill=role.can_prefill,
        block_size_tokens=layout.block_size_tokens,
        block_bytes=layout.block_bytes,
        total_blocks=report.blocks.total,
        max_prefill_tokens=max_tokens if role.can_prefill else 0,
        max_decode_tokens=max_tokens if role.can_decode else 0,
        decoding_seqs=decoding_seqs,
        decoding_context_tokens=decoding_context_tokens,
        joining_seqs_unknown=0 if decoding_seqs else report.waiting_seqs,
        max_chunk_tokens=max(1, (report.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS) - decoding_seqs),
        slo_step_s=report.slo_step_s,
        max_num_seqs=report.max_num_seqs,
        mean_output_tokens=report.mean_output_tokens if has_mean else DEFAULT_OUTPUT_TOKENS,
        recent_prefill_share=min(report.recent_prefill_share, MAX_PREFILL_SHARE),
        default_link_s_per_byte=link_s_per_byte,
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
    return replace(
        reported,
        cost_source=MEASURED_COSTS,
        mixed_decode_s=decode_s * prefill_factor,
        base_step_s=costs.step_s * prefill_factor,
        prefill_token_s=costs.prefill_token_s * prefill_factor,
        prefill_attended_s=costs.prefill_attended_s * prefill_factor,
        decode_step_s=costs.step_s * costs.decode_factor,
        decode_seq_s=costs.decode_seq_s * costs.decode_factor,
        decode_context_s=costs.decode_context_s * costs.decode_factor,
        mixed_to_decode_ratio=prefill_factor / costs.decode_factor,
    )


def reserved_state(view: WorkerView) -> ReservedState[float]:
    """Return what a worker has left and what is queued there, own placements included."""
    report, free_blocks = view.report, view.num_free_blocks
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
    )


def derived_state(reported: ReportedState[float], reserved: ReservedState[float]) -> DerivedState[float]:
    """Predict the seconds of `DerivedState` for one worker.

    `slo_step_s` comes from slack that one step can use up, but the model applies it to every step of the
    queue. If sequences have little slack, the end of a long queue is therefore predicted too early.

    The age of an answer says little about its remaining length, so each decoding sequence is expected to run
    for another whole mean answer (`decode_drain_s`), in steps as long as `recent_prefill_share` makes them.
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
    prefill_share_s, joined_step_s = _prefill_share_s(reported, reserved, queued_prefill_s)
    num_steps = ceil(max(reserved.queued_tokens / reported.max_chunk_tokens, queued_prefill_s / prefill_share_s))
    return DerivedState(
        mixed_step_s=mixed_step_s,
        queued_prefill_s=queued_prefill_s,
        prefill_share_s=prefill_share_s,
        joined_step_s=joined_step_s,
        decode_drain_s=reported.mean_output_tokens * max(decode_s / (1 - reported.recent_prefill_share), _TINY_S),
        queue_s=num_steps * mixed_step_s + queued_prefill_s,
    )


def _prefill_share_s(
    reported: ReportedState[float], reserved: ReservedState[float], queued_prefill_s: float
) -> tuple[float, float]:
    """Return (`prefill_share_s`, `joined_step_s`).

    The engine sizes its steps by the number of waiting prompts and of decoding sequences. Here the joining
    sequences, pulled ones included, stand for the former and the decoding ones for the latter.
    """
    seqs = reported.decoding_seqs + reserved.joining_seqs if reported.max_decode_tokens else 0
    if not seqs or not reported.prefill_token_s:
        return inf, 0.0
    decode_s = (
        reported.decode_step_s
        + reported.decode_seq_s * seqs
        + reported.decode_context_s * (reported.decoding_context_tokens + reserved.joining_context_tokens)
    )
    joined_step_s = decode_s * reported.mixed_to_decode_ratio
    step_s = stall_free_step_s(
        decode_s, joined_step_s, reported.slo_step_s, queued_prefill_s, reserved.joining_seqs, reported.decoding_seqs
    )
    return max(step_s - joined_step_s, reported.block_size_tokens * reported.prefill_token_s), joined_step_s
