"""Order of sequences, choice of victims and division of the token budget."""

from typing import Any

from baton.core.state_machines import SequenceState
from baton.engine.scheduling.batcher import admission_order, decode_order, preemption_victim, split_budget
from baton.engine.state.sequence import EngineSequence
from tests.builders import sequence_request


def make_seq(
    arrival: int, *, num_uncomputed: int = 1, state: SequenceState = SequenceState.RUNNING, **request: Any
) -> EngineSequence:
    seq = EngineSequence(sequence_request(arrival, range(20), **request), key=arrival, arrival=arrival)
    seq.lifecycle.state = state
    seq.num_computed_tokens = 20 - num_uncomputed
    return seq


def arrivals(seqs: list[EngineSequence]) -> list[int]:
    return [seq.arrival for seq in seqs]


def test_admission_order_is_preempted_first_then_priority_then_arrival() -> None:
    waiting, preempted = SequenceState.WAITING, SequenceState.PREEMPTED
    seqs = [
        make_seq(1, state=waiting),
        make_seq(2, state=waiting, priority=-1),
        make_seq(3, state=preempted, priority=5),
        make_seq(4, state=waiting),
        make_seq(5, state=preempted, priority=5),
    ]
    assert arrivals(admission_order(reversed(seqs))) == [3, 5, 2, 1, 4]


def test_victim_has_the_lowest_priority_then_the_latest_arrival() -> None:
    assert preemption_victim([]) is None
    seqs = [make_seq(1, priority=1), make_seq(2, priority=1), make_seq(3)]
    assert preemption_victim(seqs) is seqs[1]


def test_prefill_only_and_receiving_sequences_are_no_victims() -> None:
    seqs = [make_seq(1), make_seq(2, prefill_only=True), make_seq(3, state=SequenceState.RECEIVING)]
    assert preemption_victim(seqs) is seqs[0]
    assert preemption_victim(seqs[1:]) is None


def test_decode_order_is_priority_then_arrival() -> None:
    seqs = [make_seq(1, priority=1), make_seq(2), make_seq(3, num_uncomputed=2), make_seq(4, priority=-1)]
    assert arrivals(decode_order(seqs)) == [4, 2, 1]


def test_decodes_are_scheduled_before_chunks() -> None:
    prompt, decode = make_seq(1, num_uncomputed=15), make_seq(2)
    assert split_budget([prompt, decode], 10, 10) == [(decode, 1), (prompt, 9)]
    assert decode_order([prompt, decode]) == [decode]


def test_chunks_share_the_remaining_budget_in_order() -> None:
    seqs = [make_seq(1, num_uncomputed=6), make_seq(2, num_uncomputed=9, priority=-1), make_seq(3, num_uncomputed=4)]
    assert split_budget(seqs, 12, 12) == [(seqs[1], 9), (seqs[0], 3)]
