"""What goes into a step and who waits: pure functions over sequences. They know no phases: a sequence is some
tokens behind, a step closes part of the gap."""

from collections.abc import Iterable

from baton.core.state_machines import SequenceState
from baton.engine.state.sequence import EngineSequence


def admission_order(waiting: Iterable[EngineSequence]) -> list[EngineSequence]:
    """In which order sequences get blocks: those that were preempted first, then by priority, then as they
    came."""
    return sorted(waiting, key=lambda seq: (seq.state is not SequenceState.PREEMPTED, seq.sort_key))


def decode_order(running: Iterable[EngineSequence]) -> list[EngineSequence]:
    """Those that the step carries by one token, best first. They get blocks in this order, so nobody who has
    got one is a victim later."""
    return sorted((seq for seq in running if seq.num_uncomputed_tokens == 1), key=lambda seq: seq.sort_key)


def preemption_victim(running: Iterable[EngineSequence]) -> EngineSequence | None:
    """Who loses its blocks when they run out: the lowest priority (highest number), then the youngest, of
    those that may be preempted."""
    return max((seq for seq in running if seq.can_be_preempted), key=lambda seq: seq.sort_key, default=None)


def split_budget(
    running: Iterable[EngineSequence], budget: int, max_num_batched_tokens: int
) -> list[tuple[EngineSequence, int]]:
    """Tokens for each running sequence: first to those one token behind, then chunks of what is left to the
    others, each best first."""
    shares: list[tuple[EngineSequence, int]] = []
    for seq in sorted(running, key=lambda seq: (seq.num_uncomputed_tokens > 1, seq.sort_key)):
        num_scheduled_tokens = _chunk(seq, budget, max_num_batched_tokens)
        if num_scheduled_tokens:
            shares.append((seq, num_scheduled_tokens))
            budget -= num_scheduled_tokens
    return shares


def _chunk(seq: EngineSequence, budget: int, max_num_batched_tokens: int) -> int:
    """Of a prompt of four chunks and more whose KV another worker reads, the last one is at most a sixth:
    with what does not fill a block the reader has four fifths by the time the prompt is done."""
    num_tokens = min(seq.num_uncomputed_tokens, budget)
    sixth = len(seq.token_ids) // 6
    is_long = seq.request.for_reader and seq.num_computed_tokens >= 3 * max_num_batched_tokens
    return num_tokens - sixth if is_long and num_tokens == seq.num_uncomputed_tokens > sixth else num_tokens
