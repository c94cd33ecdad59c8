"""Predicts how many seconds a worker would take for one request.

Pure functions. Those that are generic in `N` take all workers at once (`WorkerTable`, arrays) or one worker
(`WorkerRow`, floats).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

import numpy as np

from baton.core.cluster.cluster_snapshot import Overlap
from baton.core.cluster.placement import PlacementQuery
from baton.core.kv.block_hash import num_blocks_for
from baton.core.reload_limits import MAX_COMPUTE_RATIO, MAX_PULL_S, MIN_PULL_S, PEER_RELOAD_SHARE
from baton.core.step_targets import PLANNED_SHARE
from baton.scheduler.state.elementwise import ceil, exp, maximum, minimum, where
from baton.scheduler.state.shared_steps import prefill_share, ttft_slo_share
from baton.scheduler.state.worker_data import Floats, N, WorkerData, WorkerRow
from baton.scheduler.state.worker_table import WorkerTable

FULLER_FROM, FULL_FROM = 0.35, 0.9
"""Predicted share of late requests from which a worker is predicted to make its steps fuller, and as full as
possible. The engine's limits are closer to each other, but the share changes until the answer begins. From
simulations of one worker near its limit, with four seeds."""

_TINY = 1e-9
"""Lower bound for divisors; below any horizon or compute time that matters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt as each worker sees it. Arrays have one element per worker.

    The last token is never counted as cached, because it must always be computed.
    """

    num_tokens: int
    num_samples: int
    max_output_tokens: int  # still to be generated
    num_blocks: Floats  # blocks of tokens of the prompt and of each sample's first token
    block_bytes: Floats  # mean KV bytes of one of them that are read to continue after the prompt
    overlap_blocks: Floats  # leading blocks that the worker holds or soon will
    overlap_tokens: Floats  # tokens in these blocks
    reloaded_blocks: Floats  # those of them that the worker has in a slower tier only
    disk_blocks: Floats  # those of them that it has on its disk only
    pullable_blocks: dict[int, float]  # leading blocks in memory, which others can pull, by position of the holder
    held_blocks: dict[int, float]  # leading blocks in any tier, in the same way
    waited_s: float = 0.0  # since the arrival at the gateway; 0 for a request that continues an earlier attempt

    @property
    def host_blocks(self) -> Floats:
        """Blocks that the worker has in host memory only."""
        return self.reloaded_blocks - self.disk_blocks

    @property
    def memory_blocks(self) -> Floats:
        """Leading blocks that the worker has in device or host memory, or soon will."""
        return self.overlap_blocks - self.disk_blocks


def prompt_of(query: PlacementQuery, overlaps: Mapping[str, Overlap], w: WorkerTable) -> Prompt:
    """Combine a query with what the prefix index knows about it. `overlaps` is keyed by worker id."""
    block_size_tokens = w.reported.block_size_tokens
    overlap_blocks, reloaded_blocks, disk_blocks = np.zeros((3, len(w.views)))
    pullable_blocks: dict[int, float] = {}
    held_blocks: dict[int, float] = {}
    max_cached_tokens = max(0, query.num_prompt_tokens - 1)
    for worker_id, overlap in overlaps.items():
        i = w.index.get(worker_id)
        if i is not None:
            max_blocks = max_cached_tokens // block_size_tokens.item(i)
            overlap_blocks[i] = min(overlap.num_blocks, max_blocks)
            held, num_beyond = overlap.num_held_blocks, max(0, overlap.num_held_blocks - max_blocks)
            reloaded_blocks[i] = max(0, overlap.num_reloaded_blocks - num_beyond)
            disk_blocks[i] = max(0, overlap.num_disk_blocks - num_beyond)
            if (num_pullable := min(held - overlap.num_disk_blocks, max_blocks)) > 0:
                pullable_blocks[i] = num_pullable
            if (num_held := min(held, max_blocks)) > 0:
                held_blocks[i] = num_held
    return Prompt(
        num_tokens=query.num_prompt_tokens,
        num_samples=max(1, query.sample_count),
        max_output_tokens=max(1, query.max_tokens - query.num_output_tokens),
        num_blocks=np.ceil((query.num_prompt_tokens + query.sample_count) / block_size_tokens),
        block_bytes=_block_bytes(query.num_prompt_tokens, w),
        overlap_blocks=overlap_blocks,
        overlap_tokens=overlap_blocks * block_size_tokens,
        reloaded_blocks=reloaded_blocks,
        disk_blocks=disk_blocks,
        pullable_blocks=pullable_blocks,
        held_blocks=held_blocks,
        waited_s=0.0 if query.num_output_tokens else query.waited_s,
    )


def _block_bytes(num_tokens: int, w: WorkerTable) -> Floats:
    """Return `Prompt.block_bytes`. Less than all bytes of a block if layers have a window."""
    sizes = []
    for group in w.kv_groups:
        layout = group.layout
        num_blocks = max(1, num_blocks_for(num_tokens, layout.block_size_tokens))
        held = layout.windows.num_held_blocks(num_tokens) if layout.windows.has_windows else num_blocks
        sizes.append(layout.block_bytes * held / num_blocks)
    return np.array(sizes)[w.reported.kv_group.astype(np.intp)]


@dataclass(frozen=True, slots=True)
class FirstTokenTerms(Generic[N]):
    """The TTFT of one request, as each worker would compute its prompt.

    share: share of the step time that goes to the prompt and those queued before it.
    queue_s: time until these are computed.
    target_s: TTFT target, less what the request has waited before.
    """

    share: N
    queue_s: N
    target_s: N

    def prefill_s(self, w: WorkerData[N], num_tokens: int, cached_tokens: N | float) -> N:
        """Predict the time to compute the uncached rest of the prompt, after the queue."""
        return _in_steps_s(w, num_tokens - cached_tokens, prefill_compute_s(w, num_tokens, cached_tokens), self.share)


def first_token(w: WorkerData[N], query: PlacementQuery, cached_tokens: N | float) -> FirstTokenTerms[N]:
    """Predict the queue in front of a request's prompt, and the share of the step time that it gets.

    A request that continues an earlier attempt has a derived target, because its first token came before. A
    TTFT SLO has precedence over derived targets of answers, as in the engine.
    """
    num_tokens, derived, reported = query.num_prompt_tokens, w.derived, w.reported
    compute_s = prefill_compute_s(w, num_tokens, cached_tokens)
    full_s = unloaded_prefill_s(w, num_tokens, 0.0)
    slo_s, waited_s = (None, 0.0) if query.num_output_tokens else (query.slo.ttft_s, query.waited_s)
    target_s = full_s * reported.ttft_factor if slo_s is None else full_s * 0.0 + slo_s
    work_s = derived.queued_prefill_s + compute_s
    limits = (derived.joined_step_s, derived.longest_step_s, w.reserved.tpot_slo_s)
    share = prefill_share(reported, *limits, work_s=work_s)
    if slo_s is not None:
        left_s = PLANNED_SHARE * target_s - waited_s
        slo_share = ttft_slo_share(reported, derived.joined_step_s, w.reserved.tpot_slo_s, work_s=work_s, left_s=left_s)
        share = maximum(share, slo_share)
    queue_s = _in_steps_s(w, w.reserved.queued_tokens, derived.queued_prefill_s, share)
    return FirstTokenTerms(share=share, queue_s=queue_s, target_s=target_s - waited_s)


@dataclass(frozen=True, slots=True)
class ReloadTerms(Generic[N]):
    """The bytes that workers reload of a prompt, and the time that this saves.

    host_bytes, disk_bytes: of the blocks in host memory and on the disk
    saved_s: time to compute all of them. disk_saved_s: time to compute those on the disk.
    """

    host_bytes: N
    disk_bytes: N
    saved_s: N
    disk_saved_s: N


def exposed_reload_s(w: WorkerData[N], reload: ReloadTerms[N], queue_s: N) -> N:
    """Predict how much longer than its queue a prompt waits for blocks of slower tiers of its worker.

    The reload begins when the job arrives, after those under way; the tiers load at the same time. If it is
    slower than computing the same tokens, the worker computes them. If only the disk is slower, it computes
    what is on the disk.
    """
    all_s, without_disk_s, compute_s = _reload_options_s(w, reload, queue_s)
    return minimum(minimum(all_s, without_disk_s), compute_s)


def share_computed_again(w: WorkerData[float], reload: ReloadTerms[float], queue_s: float) -> tuple[float, float]:
    """Return the shares of the blocks in host memory and on the disk that the worker computes, 0 or 1 each.

    The other ones are reloaded (`exposed_reload_s`).
    """
    all_s, without_disk_s, compute_s = _reload_options_s(w, reload, queue_s)
    if all_s <= min(without_disk_s, compute_s):
        return 0.0, 0.0
    return (0.0, 1.0) if without_disk_s <= compute_s else (1.0, 1.0)


def _reload_options_s(w: WorkerData[N], reload: ReloadTerms[N], queue_s: N) -> tuple[N, N, N]:
    """Predict the wait if all is reloaded, if what is on the disk is computed, and if all is computed."""
    host_s, disk_s = tier_reload_s(w, reload.host_bytes, reload.disk_bytes)
    all_s = maximum(maximum(host_s, disk_s) - queue_s, 0.0)
    without_disk_s = maximum(host_s - queue_s, 0.0) + maximum(reload.disk_saved_s, 0.0)
    return all_s, without_disk_s, maximum(reload.saved_s, 0.0)


def tier_reload_s(w: WorkerData[N], host_bytes: N, disk_bytes: N) -> tuple[N, N]:
    """Predict the time to reload bytes from host memory and from the disk, which go on at the same time."""
    reported = w.reported
    host_s = reported.host_reload_start_s + host_bytes * reported.host_reload_s_per_byte
    disk_s = reported.disk_reload_start_s + disk_bytes * reported.disk_reload_s_per_byte
    return where(host_bytes <= 0, 0.0, host_s), where(disk_bytes <= 0, 0.0, disk_s)


def peer_reload_limit_s(w: WorkerData[N], num_tokens: int, held_tokens: N) -> N:
    """Return the longest reload that another worker begins for a pull by this one.

    num_tokens: of the prefix. held_tokens: those of them that this worker has in memory
    """
    limit_s = MAX_COMPUTE_RATIO * unloaded_prefill_s(w, num_tokens, held_tokens)
    return PEER_RELOAD_SHARE * minimum(maximum(limit_s, MIN_PULL_S), MAX_PULL_S)


def tpot_target_s(w: WorkerData[N], prompt: Prompt) -> N:
    """Return the TPOT target of a request without an SLO."""
    return idle_tpot_s(w, prompt) * w.reported.tpot_factor


def _in_steps_s(w: WorkerData[N], num_tokens: N | float, compute_s: N, share: N) -> N:
    """Predict the time of steps whose `num_tokens` prompt tokens take `compute_s` beyond the decodes."""
    return maximum(compute_s / share, _num_chunks(w, num_tokens) * w.derived.mixed_step_s + compute_s)


def _num_chunks(w: WorkerData[N], num_tokens: N | float) -> N:
    return ceil(num_tokens / w.reported.max_chunk_tokens)


def unloaded_prefill_s(w: WorkerData[N], num_tokens: int, cached_tokens: N | float) -> N:
    """Predict the time to compute a prompt on a worker that does nothing else."""
    base_s = _num_chunks(w, num_tokens - cached_tokens) * w.reported.base_step_s
    return prefill_compute_s(w, num_tokens, cached_tokens) + base_s


def prefill_compute_s(w: WorkerData[N], num_tokens: int, cached_tokens: N | float) -> N:
    """Predict the compute that a prompt adds to steps that run anyway.

    Each sequence that decodes on the worker is delayed by this time in all.
    """
    mean_attended = (num_tokens + cached_tokens + 1) / 2  # each new token attends to all tokens before it
    reported = w.reported
    return (num_tokens - cached_tokens) * (reported.prefill_token_s + reported.prefill_attended_s * mean_attended)


def expected_output_tokens(w: WorkerData[N], prompt: Prompt) -> N:
    """Predict the length of the answer: the worker's mean, at most what the request allows."""
    return minimum(w.reported.mean_output_tokens, prompt.max_output_tokens)


def time_to_fit_s(w: WorkerTable, prompt: Prompt) -> Floats:
    """Predict the time until the prompt and its samples fit into each worker's blocks and batch slots.

    The missing slots and blocks are a fraction of what the decoding sequences use, and that fraction ends in
    its share of `decode_drain_s`. Infinite where nothing decodes, because then prompts in prefill must end
    first.
    """
    used_blocks = w.reported.total_blocks - w.reserved.free_blocks
    fraction = _missing_fraction(w, prompt, w.reported.decoding_seqs, used_blocks)
    return np.where(w.reported.decoding_seqs > 0, fraction * w.derived.decode_drain_s, np.inf)


def capacity_wait_s(w: WorkerTable, prompt: Prompt, step_s: Floats) -> Floats:
    """Predict the time until the prompt and its samples fit, if all sequences placed earlier decode first.

    step_s: duration of a decode step of each worker.

    The missing slots and blocks are a fraction of all, which becomes free in that fraction of an answer's
    duration. Zero where the request fits. Unlike `time_to_fit_s`, finite where nothing decodes yet.
    """
    fraction = _missing_fraction(w, prompt, w.reported.max_num_seqs, w.reported.total_blocks)
    return fraction * w.reported.mean_output_tokens * step_s


def _missing_fraction(w: WorkerTable, prompt: Prompt, seqs: Floats, blocks: Floats) -> Floats:
    """Return the slots or blocks that the prompt and its samples lack, as a fraction of `seqs` or `blocks`.

    The larger fraction of the two counts. Zero where the request fits.
    """
    missing_seqs = (prompt.num_samples - w.reserved.free_seqs) / np.maximum(1, seqs)
    missing_blocks = (prompt.num_blocks - w.reserved.free_blocks) / np.maximum(1, blocks)
    return np.maximum(0.0, np.maximum(missing_seqs, missing_blocks))


def idle_tpot_s(w: WorkerData[N], prompt: Prompt) -> N:
    """Predict the TPOT of the request if no other sequence decoded on the worker, without drafts."""
    reported = w.reported
    return reported.decode_step_s + reported.decode_seq_s + reported.decode_context_s * prompt.num_tokens


def tpot_now_s(w: WorkerRow, prompt: Prompt) -> float:
    """Predict the TPOT if the request decoded right now, together with the sequences that do."""
    step_s = _decode_step_s(w, w.reported.decoding_seqs, w.reported.decoding_context_tokens, prompt)
    return _with_prefill_s(w, step_s) / w.reported.tokens_per_step


def tpot_s(w: WorkerData[N], prompt: Prompt, horizon_s: float) -> N:
    """Predict the TPOT of the request once its prompt is computed, in `horizon_s`.

    Until then some of the decoding sequences end, and those placed earlier join, of which some end too.
    Prompts computed beside the answer delay it. The delay is the larger of two: the recent prefill share,
    or the prompts still queued at that time, spread over the steps of the answer. A worker with too many
    late requests makes steps that are as full as possible. Drafts give more tokens in the same time.
    """
    reported, reserved = w.reported, w.reserved
    num_drains = maximum(horizon_s / w.derived.decode_drain_s, _TINY)
    staying = exp(-num_drains)
    joining = (1 - staying) / num_drains
    joining_context = reserved.joining_context_tokens + reported.joining_seqs_unknown * prompt.num_tokens
    seqs = reported.decoding_seqs * staying + reserved.joining_seqs * joining
    context = reported.decoding_context_tokens * staying + joining_context * joining
    still_queued_s = maximum(w.derived.queue_s - horizon_s, 0.0)
    step_s = _decode_step_s(w, seqs, context, prompt)
    num_steps = expected_output_tokens(w, prompt) / reported.tokens_per_step
    usual_s = maximum(_with_prefill_s(w, step_s), step_s + still_queued_s / num_steps)
    longer_s = maximum(_full_step_s(w, step_s, prompt) - usual_s, 0.0)
    return (usual_s + full_part(w, prompt) * longer_s) / reported.tokens_per_step


def full_part(w: WorkerData[N], prompt: Prompt) -> N:
    """Predict how far steps go from ones within targets, 0, to ones that are as full as possible, 1.

    This is the rule of the engine's step budget (`engine.scheduling.step_budget`), for queued prompts that
    are as long as this one, have waited as long before they were placed, and came evenly over the time of the
    queue. Answers count as on time.
    """
    reported, num_tokens, least_s = w.reported, prompt.num_tokens, prompt.waited_s
    full_s = prefill_compute_s(w, num_tokens, 0.0) + _num_chunks(w, num_tokens) * reported.base_step_s
    target_s, queue_s = maximum(reported.ttft_factor * full_s, _TINY), maximum(w.derived.queue_s, _TINY)
    num_prompts = w.reserved.queued_tokens / num_tokens
    late_part = minimum(maximum((least_s + queue_s - target_s) / queue_s, 0.0), 1.0)
    mean_wait_s = (maximum(target_s, least_s) + least_s + queue_s) / 2  # of those that are late
    late = num_prompts * late_part * mean_wait_s / target_s  # each counts by its wait over the target
    on_time = num_prompts * (1 - late_part) + reported.decoding_seqs
    late_share = late / maximum(late + on_time, _TINY)
    return minimum(maximum((late_share - FULLER_FROM) / (FULL_FROM - FULLER_FROM), 0.0), 1.0)


def _full_step_s(w: WorkerData[N], decode_step_s: N, prompt: Prompt) -> N:
    """Predict a mixed step with the largest chunk, at most as long as TPOT SLOs allow."""
    reported, slo_s = w.reported, w.reserved.tpot_slo_s
    token_s = prefill_compute_s(w, prompt.num_tokens, 0.0) / prompt.num_tokens
    step_s = decode_step_s * reported.mixed_to_decode_ratio + token_s * reported.max_chunk_tokens
    return where(slo_s > 0, minimum(step_s, PLANNED_SHARE * slo_s * reported.tokens_per_step), step_s)


def exposed_transfer_s(
    num_bytes: float, last_bytes: Floats, s_per_byte: Floats, queued_s: Floats, compute_s: Floats, last_part: Floats
) -> Floats:
    """Predict how long the KV transfer goes on after the prompt is computed.

    num_bytes, last_bytes: bytes of the whole prompt and of its last chunk.
    queued_s: time for what the link has to carry before.
    compute_s, last_part: compute time, and the fraction of it that the last chunk takes.

    Blocks are read while later ones are computed. Only the last chunk must wait for all of the computing.
    """
    return np.maximum(last_bytes * s_per_byte, num_bytes * s_per_byte + queued_s - compute_s * (1 - last_part))


def _with_prefill_s(w: WorkerData[N], decode_step_s: N) -> N:
    """Return the mean time of a step if prompts take the same share of step time as recently.

    The step budget does not limit this mean further. Recent steps kept to it already, and if the share takes
    longer steps than the budget allows, the queue grows until it allows them.
    """
    return decode_step_s / (1 - w.reported.recent_prefill_share)


def _decode_step_s(w: WorkerData[N], seqs: N, context_tokens: N, prompt: Prompt) -> N:
    """Predict a decode step of these sequences plus the request's.

    Sequences above `max_num_seqs` wait, so they take part in no step.
    """
    reported = w.reported
    seqs = seqs + prompt.num_samples
    running = minimum(reported.max_num_seqs / seqs, 1.0)
    context_tokens = context_tokens + prompt.num_samples * prompt.num_tokens
    return reported.decode_step_s + running * (
        reported.decode_seq_s * seqs + reported.decode_context_s * context_tokens
    )
