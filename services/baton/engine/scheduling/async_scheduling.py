"""Async scheduling: plans the next step while the current one runs, so that the device does not wait for the
host.

Only decodes are planned ahead, one token per sequence. Everything else (prefill, forks of samples,
preemption, drafts) waits for the result of the current step. A sequence that turns out to have ended was
scheduled for one step too many. The result of that step is ignored for it, and the pool's fence keeps its
blocks from being reallocated until the step has ended.
"""

from collections.abc import Iterable
from dataclasses import replace

from baton.core.kv.block_hash import token_ids
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.sequence import EngineSequence, reaches_max_length
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import NothingToFollow, SampleRequest, StepPlan, StepResult, StepSequence

PLACEHOLDER = token_ids((0,))
"""Stands for the token of a sequence that the preceding step has not drawn yet."""


def plan_next_decode(
    plan: StepPlan,
    sequences: SequenceTable,
    pool: BlockPool,
    config: EngineConfig,
    deferred: frozenset[int] = frozenset(),
) -> list[EngineSequence]:
    """Return the sequences that decode in the step after `plan`, while `plan` is running.

    Each has a block for its token; missing blocks are allocated here. Empty if the next step depends on the
    result of `plan`, or if all sequences end with it.
    deferred: sequences that the step before `plan` deferred. If `plan` follows that step, it draws nothing
        for them, and they must be planned anew.
    """
    if plan.follows is not None and any(part.seq_id in deferred for part in plan.sequences):
        return []
    if sequences.queue or plan.block_copies or not sequences.running.keys() <= {part.seq_id for part in plan.sequences}:
        return []
    found: list[EngineSequence] = []
    for part in plan.sequences:
        seq = sequences.running.get(part.seq_id)
        if seq is None:  # it has ended in the meantime
            continue
        if part.sample is None or len(seq.sample_indices) > 1 or part.sample.drafts:
            return []  # with drafts, the number of its new tokens is unknown
        if not seq.request.prefill_only and not reaches_max_length(
            seq.request, len(seq.token_ids) + 1, config.max_model_len
        ):
            found.append(seq)
    return found if all(_ensure_block(seq, pool) for seq in found) else []


class LastResult:
    """Keeps the result of the last successful step, to fill in placeholders of the following step."""

    def __init__(self) -> None:
        self._last: StepResult | None = None
        self._skipped: frozenset[int] = frozenset()  # deferred by the last step, and removed from this one

    def fill_in(self, plan: StepPlan) -> StepPlan:
        """Return `plan`, which starts now, with the tokens that the preceding step has drawn.

        Sequences that failed or were deferred in that step are removed. Raises NothingToFollow if `plan`
        follows a step other than the last successful one.
        """
        last, self._last = self._last, None
        self._skipped = frozenset()
        if plan.follows is None:
            return plan
        if last is None or last.step_id != plan.follows:
            raise NothingToFollow(f"step {plan.step_id} follows step {plan.follows}, which has no result")
        self._skipped = last.deferred.intersection(part.seq_id for part in plan.sequences)
        return replace(plan, sequences=tuple(_with_tokens(plan.sequences, last)), follows=None)

    def keep(self, result: StepResult) -> StepResult:
        """Store the result of a successful step, and return it with the sequences that `fill_in` deferred."""
        if self._skipped:
            result = replace(result, deferred=result.deferred | self._skipped)
        self._last = result
        return result


def _with_tokens(parts: Iterable[StepSequence], before: StepResult) -> Iterable[StepSequence]:
    """Yield `parts` with their placeholders replaced by the tokens drawn in step `before`.

    The device waits for it, so it calls constructors: `dataclasses.replace` takes several times as long.
    """
    for part in parts:
        if tokens := before.samples.get(part.seq_id):
            token_id, sample = tokens[0].token_id, part.sample
            assert sample is not None
            # The history is shared with the engine, which may have appended the token already.
            history = sample.history[: sample.position - 1]
            history.append(token_id)
            yield StepSequence(
                seq_id=part.seq_id,
                token_ids=token_ids((token_id,)),
                position_begin=part.position_begin,
                kv_begin=part.kv_begin,
                block_table=part.block_table,
                sample=SampleRequest(
                    sampling=sample.sampling,
                    sample_indices=sample.sample_indices,
                    position=sample.position,
                    history=history,
                    num_prompt_tokens=sample.num_prompt_tokens,
                    banned_token_ids=sample.banned_token_ids,
                    drafts=sample.drafts,
                ),
                prompt=part.prompt,
            )


def _ensure_block(seq: EngineSequence, pool: BlockPool) -> bool:
    """Allocate the blocks of the token after the next, if they are missing. Returns False if too few are
    free.

    Unlike in `BlockAllocator`, no copy is needed: the blocks of the next token are not shared with other
    samples. Nothing is reserved, because all prompts are computed.
    """
    if len(seq.token_ids) // pool.block_size_tokens < seq.num_blocks:
        return True
    new = pool.allocate(seq.num_tables, range(seq.num_tables))
    seq.append_blocks(new or ())
    return new is not None
