"""Seconds: what a worker would take for one request. Pure functions, of all workers at once (`WorkerTable`)
or of one (`Row`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from baton.core.cluster.cluster_snapshot import Overlap
from baton.core.cluster.placement import PlacementQuery
from baton.core.step_cost import MAX_PREFILL_SHARE, QUEUE_TARGET_S
from baton.scheduler.state.worker_table import Floats, N, Row, Rows, WorkerTable

SHORT_S = 0.25
"""A prompt that takes no longer hardly moves what prompts get of a step: that is not worked out for all
workers again."""
_TINY = 1e-9
"""Of a life: nothing ends or joins in less. Of computing: none is left."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt. Per worker: `num_blocks`, with a place for each sample's first token;
    `own_blocks`, leading blocks that it has or soon will, and `own_tokens` in them. `held_blocks`: that can
    be pulled, by the column of who holds them. Neither covers the last token, which must be computed."""

    num_tokens: int
    num_samples: int
    num_outputs_left: int
    num_blocks: Floats
    own_blocks: Floats
    own_tokens: Floats
    held_blocks: dict[int, float]


def prompt_of(query: PlacementQuery, overlaps: Mapping[str, Overlap], c: WorkerTable) -> Prompt:
    own_blocks = np.zeros(len(c.views))
    held_blocks: dict[int, float] = {}
    most_tokens = max(0, query.num_prompt_tokens - 1)
    for worker_id, overlap in overlaps.items():
        i = c.index.get(worker_id)
        if i is not None:
            most = most_tokens // c.block_tokens.item(i)
            own_blocks[i] = min(overlap.num_blocks, most)
            if overlap.num_held_blocks and most:
                held_blocks[i] = min(overlap.num_held_blocks, most)
    return Prompt(
        num_tokens=query.num_prompt_tokens,
        num_samples=max(1, query.sample_count),
        num_outputs_left=max(1, query.max_tokens - query.num_output_tokens),
        num_blocks=np.ceil((query.num_prompt_tokens + query.sample_count) / c.block_tokens),
        own_blocks=own_blocks,
        own_tokens=own_blocks * c.block_tokens,
        held_blocks=held_blocks,
    )


def prefill_s(c: Rows[N], num_tokens: int, cached_tokens: N | float) -> N:
    """To compute what is left of a prompt of `num_tokens`, chunk by chunk, beside what decodes there."""
    compute_s = added_s(c, num_tokens, cached_tokens)
    return (
        _ceil(_most((num_tokens - cached_tokens) / c.chunk_tokens, _num_shares(c, compute_s))) * c.beside_s + compute_s
    )


def added_s(c: Rows[N], num_tokens: int, cached_tokens: N | float) -> N:
    """What that adds to steps that run anyway: by so much each sequence that decodes there is delayed."""
    mean_attended = (num_tokens + cached_tokens + 1) / 2  # of the new tokens, each attends to all before it
    return (num_tokens - cached_tokens) * (c.token_s + c.attended_s * mean_attended)


def mixed_step_s(row: Row, num_tokens: int, cached_tokens: float) -> float:
    """The longest step that decodes and computes a chunk of that prompt, its last one."""
    chunk = min(row.chunk_tokens, num_tokens - cached_tokens)
    before = num_tokens - chunk
    share_s = _share_s(row, added_s(row, num_tokens, cached_tokens))
    return row.beside_s + min(share_s, chunk * (row.token_s + row.attended_s * (before + (chunk + 1) / 2)))


def expected_outputs(c: Rows[N], prompt: Prompt) -> N:
    """Tokens that the answer is expected to have."""
    return _least(c.output_tokens, prompt.num_outputs_left)


def room_s(c: WorkerTable, prompt: Prompt) -> Floats:
    """Until so many of the sequences that decode at a worker have ended that the prompt, and its samples,
    have room there: their part of those that do, times what a part takes to end. Infinite where nothing
    decodes: then room comes with the prompts that are computed."""
    seqs = (prompt.num_samples - c.free_seqs) / np.maximum(1, c.decoding_seqs)
    blocks = (prompt.num_blocks - c.free_blocks) / np.maximum(1, c.total_blocks - c.free_blocks)
    return np.where(c.decoding_seqs > 0, np.maximum(0.0, np.maximum(seqs, blocks)) * c.leave_s, np.inf)


def idle_tpot_s(row: Row, prompt: Prompt) -> float:
    """A step's time if nobody else decoded there."""
    return row.decode_step_s + row.decode_seq_s + row.decode_context_s * prompt.num_tokens


def tpot_now_s(row: Row, prompt: Prompt) -> float:
    """A step's time if the request decoded right now, beside those that do."""
    return _step_s(row, row.decoding_seqs, row.decoding_context, prompt)


def tpot_s(c: Rows[N], prompt: Prompt, horizon_s: float) -> N:
    """A step's time once the prompt is computed, in `horizon_s`: of those that decode now some have ended by
    then, those that were placed before will have joined (and some of them ended), and what still waits there
    to be computed takes its part, spread over the answer."""
    lives = _most(horizon_s / c.leave_s, _TINY)
    stay = _exp(-lives)
    join = (1 - stay) / lives
    seqs = c.decoding_seqs * stay + c.joining_seqs * join
    context = c.decoding_context * stay + (c.joining_context + c.joining_alike * prompt.num_tokens) * join
    still_queued_s = _most(c.queue_s - horizon_s, 0.0)
    return _step_s(c, seqs, context, prompt) + still_queued_s / expected_outputs(c, prompt)


def exposed_s(
    num_bytes: float, last_bytes: Floats, s_per_byte: Floats, queued_s: Floats, compute_s: Floats, last_part: Floats
) -> Floats:
    """How much longer the KV takes than computing it: blocks are read while later ones are computed, but
    those of the last chunk (`last_part` of the computing) only after it. What the link has to do already
    comes first."""
    return np.maximum(last_bytes * s_per_byte, num_bytes * s_per_byte + queued_s - compute_s * (1 - last_part))


def _num_shares(c: Rows[N], own_s: N) -> N:
    """In how many steps `own_s` of computing is done, of one more prompt, behind which the others are left:
    the integral of 1 / `_share_s`. With a part p = left / QUEUE_TARGET_S that is relax_s p / (1 - p), where that
    is more than share_s."""
    if not isinstance(own_s, float) and own_s.max() < SHORT_S:
        return own_s / c.share_s
    least_s, most_s = c.compute_s, c.compute_s + own_s
    relax_s = _most(c.relax_s, _TINY)
    even_s = QUEUE_TARGET_S / (1 + relax_s / c.share_s)
    low_s = _between(even_s, least_s, most_s)
    high_s = _between(_most(even_s, MAX_PREFILL_SHARE * QUEUE_TARGET_S), low_s, most_s)
    most_share_s = _most(relax_s * MAX_PREFILL_SHARE / (1 - MAX_PREFILL_SHARE), c.share_s)
    relaxed = (QUEUE_TARGET_S * _log(_most(high_s, _TINY) / _most(low_s, _TINY)) - (high_s - low_s)) / relax_s
    return (low_s - least_s) / c.share_s + relaxed + (most_s - high_s) / most_share_s


def _share_s(c: Row, own_s: float) -> float:
    """What prompts get of a step while `own_s` of computing is left of one more."""
    part = _least((c.compute_s + own_s) / QUEUE_TARGET_S, MAX_PREFILL_SHARE)
    return _most(c.relax_s * part / (1 - part), c.share_s)


def _step_s(c: Rows[N], seqs: N, context: N, prompt: Prompt) -> N:
    """Sequences over `max_num_seqs` wait: they are in no step."""
    seqs = seqs + prompt.num_samples
    running = _least(c.max_num_seqs / seqs, 1.0)
    context = context + prompt.num_samples * prompt.num_tokens
    return c.decode_step_s + running * (c.decode_seq_s * seqs + c.decode_context_s * context)


# numpy's functions take ten times as long as Python's for one number, and what they return goes on being
# slow.


def _least(a: N, b: float) -> N:
    return min(a, b) if isinstance(a, float) else np.minimum(a, b)


def _most(a: N, b: N | float) -> N:
    return max(a, b) if isinstance(a, float) else np.maximum(a, b)


def _between(a: N, least: N, most: N) -> N:
    return min(max(a, least), most) if isinstance(a, float) else np.minimum(np.maximum(a, least), most)


def _log(a: N) -> N:
    return log(a) if isinstance(a, float) else np.log(a)


def _ceil(a: N) -> N:
    return ceil(a) if isinstance(a, float) else np.ceil(a)


def _exp(a: N) -> N:
    return exp(a) if isinstance(a, float) else np.exp(a)
