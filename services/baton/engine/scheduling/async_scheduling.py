"""Steps that are planned while the one before still runs, so that the device need not wait for us: what they
may be, and what they become once that one's tokens are known.

Only answers go on so, each by one token. Whatever else may be due (a prompt, a part of one, samples that
part, memory that somebody must give up) waits for the result and is planned from it. An answer that turns out
to have ended was in one step too many: its result is passed over, and the pool's fence keeps what it writes
to from everybody else until then.
"""

from collections.abc import Iterable
from dataclasses import replace

from baton.core.kv.block_hash import token_ids
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.engine_config import EngineConfig
from baton.engine.state.sequence import EngineSequence, reaches_max_length
from baton.engine.state.sequence_table import SequenceTable
from baton.engine.state.step import NothingToFollow, StepPlan, StepResult, StepSequence

PLACEHOLDER = token_ids((0,))
"""Stands for the one token of a sequence in a step that follows another."""


def plan_next_decode(
    plan: StepPlan, sequences: SequenceTable, pool: BlockPool, config: EngineConfig
) -> list[EngineSequence]:
    """Those that the step after `plan`, which runs now, carries by one token; each has a place for it, taken
    from the pool where it lacked one. Empty if that step cannot be known, or if all end with this one."""
    if sequences.queue or plan.block_copies or not sequences.running.keys() <= {part.seq_id for part in plan.sequences}:
        return []
    found: list[EngineSequence] = []
    for part in plan.sequences:
        seq = sequences.running.get(part.seq_id)
        if seq is None:  # it has ended since
            continue
        if part.sample is None or len(seq.sample_indices) > 1:
            return []
        if not seq.request.prefill_only and not reaches_max_length(
            seq.request, len(seq.token_ids) + 1, config.max_model_len
        ):
            found.append(seq)
    return found if all(_has_or_gets(seq, pool) for seq in found) else []


class LastResult:
    """What a device keeps of the step before, where that has ended well: the step that follows it lacks its
    tokens."""

    def __init__(self) -> None:
        self._last: StepResult | None = None

    def fill_in(self, plan: StepPlan) -> StepPlan:
        """`plan`, which begins now, with the tokens that the step before it has drawn, without the sequences
        that failed in that. Raises NothingToFollow if it follows another one, or one that has not ended
        well."""
        last, self._last = self._last, None
        if plan.follows is None:
            return plan
        if last is None or last.step_id != plan.follows:
            raise NothingToFollow(f"step {plan.step_id} follows step {plan.follows}, which has no result")
        return replace(plan, sequences=tuple(_known(plan.sequences, last)), follows=None)

    def keep(self, result: StepResult) -> StepResult:
        self._last = result
        return result


def _known(parts: Iterable[StepSequence], before: StepResult) -> Iterable[StepSequence]:
    for part in parts:
        if tokens := before.samples.get(part.seq_id):
            token = token_ids((tokens[0].token_id,))
            assert part.sample is not None
            # The history is the engine's own, and may have the token by now.
            history = part.sample.history[: part.sample.position - 1] + token
            yield replace(part, token_ids=token, sample=replace(part.sample, history=history))


def _has_or_gets(seq: EngineSequence, pool: BlockPool) -> bool:
    """Whether the token after the next has a place. The block that the next one is written to is no other
    sample's any more."""
    if len(seq.token_ids) // pool.block_size_tokens < len(seq.block_table):
        return True
    new = pool.allocate(1)
    seq.block_table += new or ()
    return new is not None
