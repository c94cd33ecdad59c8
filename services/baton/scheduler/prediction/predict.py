"""Predicts how many seconds a worker would take for one request.

Pure functions. Those that are generic in `N` take all workers at once (`WorkerTable`, arrays) or one worker
(`WorkerRow`, floats).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from baton.core.cluster.cluster_snapshot import Overlap
from baton.core.cluster.placement import PlacementQuery
from baton.core.step_cost import MAX_PREFILL_SHARE, QUEUE_TARGET_S
from baton.scheduler.state.worker_data import Floats, N, WorkerData, WorkerRow
from baton.scheduler.state.worker_table import WorkerTable

SHORT_PROMPT_S = 0.25
"""Prompts below this compute time barely change the prefill share of a step.

If all workers are below it, the share is taken as constant, which saves time.
"""
_TINY = 1e-9
"""Lower bound for divisors and logarithms; below any horizon or compute time that matters."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt as each worker sees it. Arrays have one element per worker.

    The last token is never counted as cached, because it must always be computed.
    """

    num_tokens: int
    num_samples: int
    max_output_tokens: int  # still to be generated
    num_blocks: Floats  # blocks of the prompt and of each sample's first token
    overlap_blocks: Floats  # leading blocks that the worker holds or soon will
    overlap_tokens: Floats  # tokens in these blocks
    pullable_blocks: dict[int, float]  # leading blocks that other workers can pull, by position of the holder


def prompt_of(query: PlacementQuery, overlaps: Mapping[str, Overlap], w: WorkerTable) -> Prompt:
    """Combine a query with what the prefix index knows about it. `overlaps` is keyed by worker id."""
    block_size_tokens = w.reported.block_size_tokens
    overlap_blocks = np.zeros(len(w.views))
    pullable_blocks: dict[int, float] = {}
    max_cached_tokens = max(0, query.num_prompt_tokens - 1)
    for worker_id, overlap in overlaps.items():
        i = w.index.get(worker_id)
        if i is not None:
            max_blocks = max_cached_tokens // block_size_tokens.item(i)
            overlap_blocks[i] = min(overlap.num_blocks, max_blocks)
            if overlap.num_held_blocks and max_blocks:
                pullable_blocks[i] = min(overlap.num_held_blocks, max_blocks)
    return Prompt(
        num_tokens=query.num_prompt_tokens,
        num_samples=max(1, query.sample_count),
        max_output_tokens=max(1, query.max_tokens - query.num_output_tokens),
        num_blocks=np.ceil((query.num_prompt_tokens + query.sample_count) / block_size_tokens),
        overlap_blocks=overlap_blocks,
        overlap_tokens=overlap_blocks * block_size_tokens,
        pullable_blocks=pullable_blocks,
    )


def prefill_s(w: WorkerData[N], num_tokens: int, cached_tokens: N | float) -> N:
    """Predict the time to compute the uncached rest of a prompt, in chunks that share steps with decodes."""
    compute_s = prefill_compute_s(w, num_tokens, cached_tokens)
    num_chunks = (num_tokens - cached_tokens) / w.reported.max_chunk_tokens
    num_steps = _ceil(_maximum(num_chunks, _num_shared_steps(w, compute_s)))
    return num_steps * w.derived.mixed_step_s + compute_s


def prefill_compute_s(w: WorkerData[N], num_tokens: int, cached_tokens: N | float) -> N:
    """Predict the compute that a prompt adds to steps that run anyway.

    Each sequence that decodes on the worker is delayed by this time in all.
    """
    mean_attended = (num_tokens + cached_tokens + 1) / 2  # each new token attends to all tokens before it
    reported = w.reported
    return (num_tokens - cached_tokens) * (reported.prefill_token_s + reported.prefill_attended_s * mean_attended)


def longest_mixed_step_s(w: WorkerRow, num_tokens: int, cached_tokens: float) -> float:
    """Predict the longest step that decodes and computes a chunk of the prompt. It is the last one."""
    reported = w.reported
    chunk = min(reported.max_chunk_tokens, num_tokens - cached_tokens)
    num_before = num_tokens - chunk
    share_s = _prefill_share_s(w, prefill_compute_s(w, num_tokens, cached_tokens))
    chunk_s = chunk * (reported.prefill_token_s + reported.prefill_attended_s * (num_before + (chunk + 1) / 2))
    return w.derived.mixed_step_s + min(share_s, chunk_s)


def expected_output_tokens(w: WorkerData[N], prompt: Prompt) -> N:
    """Predict the length of the answer: the worker's mean, at most what the request allows."""
    return _minimum(w.reported.mean_output_tokens, prompt.max_output_tokens)


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


def idle_tpot_s(w: WorkerRow, prompt: Prompt) -> float:
    """Predict the TPOT of the request if no other sequence decoded on the worker."""
    reported = w.reported
    return reported.decode_step_s + reported.decode_seq_s + reported.decode_context_s * prompt.num_tokens


def tpot_now_s(w: WorkerRow, prompt: Prompt) -> float:
    """Predict the TPOT if the request decoded right now, together with the sequences that do."""
    step_s = _decode_step_s(w, w.reported.decoding_seqs, w.reported.decoding_context_tokens, prompt)
    return _with_prefill_s(w, step_s)


def tpot_s(w: WorkerData[N], prompt: Prompt, horizon_s: float) -> N:
    """Predict the TPOT of the request once its prompt is computed, in `horizon_s`.

    Until then some of the decoding sequences end, and those placed earlier join, of which some end too.
    Prompts computed beside the answer delay it. The delay is the larger of two: the recent prefill share,
    or the prompts still queued at that time, spread over the tokens of the answer.
    """
    reported, reserved = w.reported, w.reserved
    num_drains = _maximum(horizon_s / w.derived.decode_drain_s, _TINY)
    staying = _exp(-num_drains)
    joining = (1 - staying) / num_drains
    joining_context = reserved.joining_context_tokens + reported.joining_seqs_unknown * prompt.num_tokens
    seqs = reported.decoding_seqs * staying + reserved.joining_seqs * joining
    context = reported.decoding_context_tokens * staying + joining_context * joining
    still_queued_s = _maximum(w.derived.queue_s - horizon_s, 0.0)
    step_s = _decode_step_s(w, seqs, context, prompt)
    return _maximum(_with_prefill_s(w, step_s), step_s + still_queued_s / expected_output_tokens(w, prompt))


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


def _num_shared_steps(w: WorkerData[N], compute_s: N) -> N:
    """Predict in how many mixed steps `compute_s` of prefill is done, after the prompts queued before it.

    The integral of 1 / `_prefill_share_s` over the compute that is left. With the part p = left /
    QUEUE_TARGET_S, the share is joined_step_s * p / (1 - p) where that is more than prefill_share_s.
    """
    share_s = w.derived.prefill_share_s
    if not isinstance(compute_s, float) and compute_s.max() < SHORT_PROMPT_S:
        return compute_s / share_s
    least_s, most_s = w.derived.queued_prefill_s, w.derived.queued_prefill_s + compute_s
    joined_step_s = _maximum(w.derived.joined_step_s, _TINY)
    even_s = QUEUE_TARGET_S / (1 + joined_step_s / share_s)
    low_s = _clip(even_s, least_s, most_s)
    high_s = _clip(_maximum(even_s, MAX_PREFILL_SHARE * QUEUE_TARGET_S), low_s, most_s)
    max_share_s = _maximum(joined_step_s * MAX_PREFILL_SHARE / (1 - MAX_PREFILL_SHARE), share_s)
    growing = (
        QUEUE_TARGET_S * _log(_maximum(high_s, _TINY) / _maximum(low_s, _TINY)) - (high_s - low_s)
    ) / joined_step_s
    return (low_s - least_s) / share_s + growing + (most_s - high_s) / max_share_s


def _prefill_share_s(w: WorkerRow, compute_s: float) -> float:
    """Predict the prefill compute of one mixed step while `compute_s` of one more prompt is left."""
    part = _minimum((w.derived.queued_prefill_s + compute_s) / QUEUE_TARGET_S, MAX_PREFILL_SHARE)
    return _maximum(w.derived.joined_step_s * part / (1 - part), w.derived.prefill_share_s)


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
    running = _minimum(reported.max_num_seqs / seqs, 1.0)
    context_tokens = context_tokens + prompt.num_samples * prompt.num_tokens
    return reported.decode_step_s + running * (
        reported.decode_seq_s * seqs + reported.decode_context_s * context_tokens
    )


# For a single number numpy's functions are ten times slower than Python's, and so is arithmetic with their
# results.


def _minimum(a: N, b: float) -> N:
    return min(a, b) if isinstance(a, float) else np.minimum(a, b)


def _maximum(a: N, b: N | float) -> N:
    return max(a, b) if isinstance(a, float) else np.maximum(a, b)


def _clip(a: N, least: N, most: N) -> N:
    return min(max(a, least), most) if isinstance(a, float) else np.minimum(np.maximum(a, least), most)


def _log(a: N) -> N:
    return log(a) if isinstance(a, float) else np.log(a)


def _ceil(a: N) -> N:
    return ceil(a) if isinstance(a, float) else np.ceil(a)


def _exp(a: N) -> N:
    return exp(a) if isinstance(a, float) else np.exp(a)
