"""Seconds: what each worker would take for one request. Pure functions of `Columns`; where several workers are meant, all at once.

`at` in their arguments picks workers: an index, an array of them, or `ALL`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.core.cluster import Overlap, PlacementQuery
from baton.scheduler.columns import Columns, Floats

At: TypeAlias = int | slice | npt.NDArray[np.intp]
ALL = slice(None)
_TINY_S = 1e-9
"""Below any step: keeps a worker whose costs are 0 from a division by 0."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt, one number a worker. `num_blocks`: with a place for each sample's first token. `own_blocks`: leading blocks
    that the worker has or soon will; `held_blocks`: that can be pulled from it. Neither covers the last token, which must be computed."""

    num_tokens: int
    num_samples: int
    num_outputs_left: int
    num_blocks: Floats
    own_blocks: Floats
    held_blocks: Floats


def prompt_of(query: PlacementQuery, overlaps: Mapping[str, Overlap], c: Columns) -> Prompt:
    own, held = np.zeros(len(c.views)), np.zeros(len(c.views))
    for worker_id, overlap in overlaps.items():
        i = c.index.get(worker_id)
        if i is not None:
            own[i], held[i] = overlap.num_blocks, overlap.num_held_blocks
    most = np.maximum(0, query.num_prompt_tokens - 1) // c.block_tokens
    return Prompt(
        num_tokens=query.num_prompt_tokens,
        num_samples=max(1, query.sample_count),
        num_outputs_left=max(1, query.max_tokens - query.num_output_tokens),
        num_blocks=np.ceil((query.num_prompt_tokens + query.sample_count) / c.block_tokens),
        own_blocks=np.minimum(own, most),
        held_blocks=np.minimum(held, most),
    )


def queue_s(c: Columns, at: At = ALL) -> Floats:
    """Until the prompts that wait at a worker now, own placements included, are computed."""
    num_steps = np.ceil(c.queued_tokens[at] / c.chunk_tokens[at])
    steps_s = num_steps * (c.step_s[at] + c.decoding_s[at])
    return steps_s + c.token_s[at] * c.queued_tokens[at] + c.attended_s[at] * c.queued_attended[at]


def prefill_s(c: Columns, num_tokens: int, cached_tokens: Floats | float, at: At = ALL) -> Floats:
    """To compute what is left of a prompt of `num_tokens`, chunk by chunk, beside what decodes there."""
    num_steps = np.ceil((num_tokens - cached_tokens) / c.chunk_tokens[at])
    return num_steps * (c.step_s[at] + c.decoding_s[at]) + added_s(c, num_tokens, cached_tokens, at)


def own_prefill_s(c: Columns, prompt: Prompt) -> Floats:
    """The same, where each takes what it has cached itself."""
    return prefill_s(c, prompt.num_tokens, prompt.own_blocks * c.block_tokens)


def added_s(c: Columns, num_tokens: int, cached_tokens: Floats | float, at: At = ALL) -> Floats:
    """What that adds to steps that run anyway: by so much each sequence that decodes there is delayed."""
    num_new = num_tokens - cached_tokens
    return num_new * (c.token_s[at] + c.attended_s[at] * (cached_tokens + (num_new + 1) / 2))


def mixed_step_s(c: Columns, num_tokens: int, cached_tokens: float, at: int) -> float:
    """The longest step that decodes and computes a chunk of that prompt, its last one."""
    chunk = min(c.chunk_tokens[at], num_tokens - cached_tokens)
    before = num_tokens - chunk
    return float(c.step_s[at] + c.decoding_s[at] + chunk * (c.token_s[at] + c.attended_s[at] * (before + (chunk + 1) / 2)))


def expected_outputs(c: Columns, prompt: Prompt, at: At = ALL) -> Floats:
    """Tokens that the answer is expected to have."""
    expected: Floats = np.minimum(prompt.num_outputs_left, c.output_tokens[at])
    return expected


def leave_s(c: Columns, at: At = ALL) -> Floats:
    """In how long all but 1/e of the sequences that decode there will have ended. An answer's age says little about what is left of it, so
    each is expected to go on for a whole mean length."""
    step_s = c.decode_step_s[at] + c.decode_seq_s[at] * c.decoding_seqs[at] + c.decode_context_s[at] * c.decoding_context[at]
    return c.output_tokens[at] * np.maximum(step_s, _TINY_S)


def room_s(c: Columns, prompt: Prompt) -> Floats:
    """Until so many of the sequences that decode at a worker have ended that the prompt, and its samples, have room there: their part of
    those that do, times what a part takes to end. Infinite where nothing decodes: then room comes with the prompts that are computed."""
    seqs = (c.num_seqs + prompt.num_samples - c.max_num_seqs) / np.maximum(1, c.decoding_seqs)
    blocks = (prompt.num_blocks - c.free_blocks) / np.maximum(1, c.total_blocks - c.free_blocks)
    return np.where(c.decoding_seqs > 0, np.maximum(0.0, np.maximum(seqs, blocks)) * leave_s(c), np.inf)


def tpot_now_s(c: Columns, prompt: Prompt, at: At = ALL) -> Floats:
    """A step's time if the request decoded right now, beside those that do."""
    return _step_s(c, c.decoding_seqs[at], c.decoding_context[at], prompt, at)


def tpot_s(c: Columns, prompt: Prompt, horizon_s: float, queued_s: Floats, at: At = ALL) -> Floats:
    """A step's time once the prompt is computed, in `horizon_s`: of those that decode now some have ended by then, those that were placed
    before will have joined (and some of them ended), and what still waits there to be computed (`queued_s` now) takes its part, spread over
    the answer."""
    decoding, context, joining = c.decoding_seqs[at], c.decoding_context[at], c.joining_seqs[at]
    lives = np.maximum(horizon_s / leave_s(c, at), _TINY_S)
    stay = np.exp(-lives)
    join = (1 - stay) / lives
    mean_context = np.where(decoding > 0, context / np.maximum(1, decoding), prompt.num_tokens)
    joining_context = c.joining_context[at] + c.unknown_seqs[at] * mean_context
    step_s = _step_s(c, decoding * stay + joining * join, context * stay + joining_context * join, prompt, at)
    still_queued_s = np.maximum(0.0, queued_s - horizon_s)
    return step_s + still_queued_s / expected_outputs(c, prompt, at)


def exposed_s(
    num_bytes: Floats | float,
    last_bytes: Floats | float,
    s_per_byte: Floats,
    queued_s: Floats,
    compute_s: Floats,
    last_part: Floats | float,
) -> Floats:
    """How much longer the KV takes than computing it: blocks are read while later ones are computed, but those of the last chunk
    (`last_part` of the computing) only after it. What the link has to do already comes first."""
    return np.maximum(last_bytes * s_per_byte, num_bytes * s_per_byte + queued_s - compute_s * (1 - last_part))


def _step_s(c: Columns, seqs: Floats, context: Floats, prompt: Prompt, at: At) -> Floats:
    """Sequences over `max_num_seqs` wait: they are in no step."""
    seqs = seqs + prompt.num_samples
    running = np.minimum(1.0, c.max_num_seqs[at] / seqs)
    context = context + prompt.num_samples * prompt.num_tokens
    return c.decode_step_s[at] + running * (c.decode_seq_s[at] * seqs + c.decode_context_s[at] * context)
