"""Builds the part of a step that belongs to one sequence, from the state of the sequence."""

from collections.abc import Collection

from baton.core.kv.block_hash import token_ids
from baton.engine.scheduling.async_scheduling import PLACEHOLDER
from baton.engine.state.sequence import EngineSequence, end_token_ids
from baton.engine.state.step import PromptRequest, SampleRequest, StepSequence


def step_part(
    seq: EngineSequence, num_scheduled_tokens: int, eos_token_ids: Collection[int], drafts: tuple[int, ...] = ()
) -> StepSequence:
    """Return the part of `seq` in a step that computes its next `num_scheduled_tokens` tokens.

    drafts: guesses of the tokens after these, which are all of its tokens. The step verifies them.
    """
    begin = seq.num_computed_tokens
    tokens = seq.token_ids[begin : begin + num_scheduled_tokens]
    samples = num_scheduled_tokens == seq.num_uncomputed_tokens
    return StepSequence(
        seq_id=seq.key,
        token_ids=tokens + token_ids(drafts) if drafts else tokens,
        position_begin=begin,
        kv_begin=begin,
        block_table=seq.block_ids,
        sample=sample_request(seq, eos_token_ids, drafts=drafts) if samples else None,
        prompt=_prompt_request(seq, num_scheduled_tokens),
    )


def step_part_ahead(seq: EngineSequence, eos_token_ids: Collection[int]) -> StepSequence:
    """Return the part of `seq` in the step after the one that is about to append a token to it."""
    begin = len(seq.token_ids)
    return StepSequence(
        seq_id=seq.key,
        token_ids=PLACEHOLDER,
        position_begin=begin,
        kv_begin=begin,
        block_table=seq.block_ids,
        sample=sample_request(seq, eos_token_ids, num_pending_tokens=1),
    )


def sample_request(
    seq: EngineSequence, eos_token_ids: Collection[int], num_pending_tokens: int = 0, drafts: tuple[int, ...] = ()
) -> SampleRequest:
    """Return the sample request of `seq` after `num_pending_tokens` more tokens were appended."""
    sampling = seq.request.sampling
    is_below_minimum = seq.num_output_tokens + num_pending_tokens < sampling.min_tokens
    return SampleRequest(
        sampling=sampling,
        sample_indices=seq.sample_indices,
        position=len(seq.token_ids) + num_pending_tokens,
        history=seq.token_ids,
        num_prompt_tokens=seq.request.num_prompt_tokens,
        banned_token_ids=end_token_ids(sampling, eos_token_ids) if is_below_minimum else (),
        drafts=drafts,
    )


def _prompt_request(seq: EngineSequence, num_scheduled_tokens: int) -> PromptRequest | None:
    """Return the request for the logprobs of the prompt tokens that follow the scheduled ones."""
    num_logprobs = seq.request.sampling.num_prompt_logprobs
    if num_logprobs is None or not seq.reports_prompt:
        return None
    end = min(seq.num_computed_tokens + num_scheduled_tokens + 1, seq.request.num_prompt_tokens)
    targets = seq.token_ids[seq.num_computed_tokens + 1 : end]
    return PromptRequest(targets=targets, num_logprobs=num_logprobs) if targets else None
