"""Pure functions that order sequences and divide the token budget of a step between them.

There is no separate prefill or decode phase. A sequence has some tokens whose KV is not computed, and a step
computes a part of them.
"""

from collections.abc import Iterable

from baton.core.state_machines import SequenceState
from baton.engine.state.sequence import EngineSequence

MAX_PROMPT_ROWS = 64
"""Prompt tokens of one step whose logprobs are computed. Each needs logits for the whole vocabulary."""


def admission_key(seq: EngineSequence) -> tuple[bool, tuple[int, int, int]]:
    """Return the sort key of prompts: preempted sequences first, then by priority and arrival."""
    return seq.state is not SequenceState.PREEMPTED, seq.sort_key


def admission_order(waiting: Iterable[EngineSequence]) -> list[EngineSequence]:
    """Return queued sequences in admission order, which is that of `admission_key`."""
    return sorted(waiting, key=admission_key)


def decode_order(running: Iterable[EngineSequence]) -> list[EngineSequence]:
    """Return the decoding sequences, highest priority first.

    They get blocks in this order, and victims are taken from the end, so a sequence that got a block is not
    preempted later in the same step.
    """
    return sorted((seq for seq in running if seq.num_uncomputed_tokens == 1), key=lambda seq: seq.sort_key)


def preemption_victim(running: Iterable[EngineSequence]) -> EngineSequence | None:
    """Return the sequence to preempt: the one with the lowest priority (highest number), then the latest
    arrival.

    None if no sequence may be preempted.
    """
    return max((seq for seq in running if seq.can_be_preempted), key=lambda seq: seq.sort_key, default=None)


def split_budget(
    running: Iterable[EngineSequence], budget: int, max_num_batched_tokens: int
) -> list[tuple[EngineSequence, int]]:
    """Divide the token budget between running sequences. Returns (sequence, scheduled tokens), without zeros.

    Decodes are scheduled first, one token each. Prefill chunks share the rest of the budget.
    """
    scheduled: list[tuple[EngineSequence, int]] = []
    prompt_rows = MAX_PROMPT_ROWS
    for seq in sorted(running, key=lambda seq: (seq.num_uncomputed_tokens > 1, seq.sort_key)):
        num_scheduled_tokens = _chunk(seq, budget, max_num_batched_tokens)
        if seq.reports_prompt:
            num_scheduled_tokens = min(num_scheduled_tokens, prompt_rows)
            prompt_rows -= num_scheduled_tokens
        if num_scheduled_tokens:
            scheduled.append((seq, num_scheduled_tokens))
            budget -= num_scheduled_tokens
    return scheduled


def prompt_rows_left(scheduled: Iterable[tuple[EngineSequence, int]]) -> int:
    """Return how many more prompt tokens may have their logprobs computed in the step."""
    return MAX_PROMPT_ROWS - sum(num_tokens for seq, num_tokens in scheduled if seq.reports_prompt)


def _chunk(seq: EngineSequence, budget: int, max_num_batched_tokens: int) -> int:
    """Return how many tokens of `seq` to schedule.

    The last chunk of a long prompt is limited to a sixth of the prompt if another worker reads its KV. The
    reader then has about four fifths of the KV when the prompt is done. Long means: at least four chunks.
    """
    num_tokens = min(seq.num_uncomputed_tokens, budget)
    sixth = len(seq.token_ids) // 6
    is_long = seq.request.for_reader and seq.num_computed_tokens >= 3 * max_num_batched_tokens
    return num_tokens - sixth if is_long and num_tokens == seq.num_uncomputed_tokens > sixth else num_tokens
