"""Order, victims and budget, as pure functions."""

from typing import Any

from baton.core.state_machines import SequenceState
from baton.engine.scheduling.batcher import admission_order, decode_order, preemption_victim, split_budget
from baton.engine.state.sequence import EngineSequence
from tests.builders import sequence_request


def make_seq(
    arrival: int, *, behind: int = 1, state: SequenceState = SequenceState.RUNNING, **request: Any
) -> EngineSequence:
    seq = EngineSequence(sequence_request(arrival, range(20), **request), key=arrival, arrival=arrival)
    seq.lifecycle.state = state
    seq.num_computed_tokens = 20 - behind
    return seq


def arrivals(seqs: list[EngineSequence]) -> list[int]:
    return [seq.arrival for seq in seqs]


def test_queue_is_preempted_first_then_by_priority_then_by_arrival() -> None:
    waiting, preempted = SequenceState.WAITING, SequenceState.PREEMPTED
    seqs = [
        make_seq(1, state=waiting),
        make_seq(2, state=waiting, priority=-1),
        make_seq(3, state=preempted, priority=5),
        make_seq(4, state=waiting),
        make_seq(5, state=preempted, priority=5),
    ]
    assert arrivals(admission_order(reversed(seqs))) == [3, 5, 2, 1, 4]


def test_victim_is_the_lowest_priority_then_the_youngest() -> None:
    assert preemption_victim([]) is None
    seqs = [make_seq(1, priority=1), make_seq(2, priority=1), make_seq(3)]
    assert preemption_victim(seqs) is seqs[1]


def test_who_may_not_be_preempted_is_no_victim() -> None:
    seqs = [make_seq(1), make_seq(2, prefill_only=True), make_seq(3, state=SequenceState.RECEIVING)]
    assert preemption_victim(seqs) is seqs[0]
    assert preemption_victim(seqs[1:]) is None


def test_the_best_get_their_blocks_first() -> None:
    seqs = [make_seq(1, priority=1), make_seq(2), make_seq(3, behind=2), make_seq(4, priority=-1)]
    assert arrivals(decode_order(seqs)) == [4, 2, 1]


def test_decodes_come_before_chunks() -> None:
    prompt, decode = make_seq(1, behind=15), make_seq(2)
    assert split_budget([prompt, decode], 10, 10) == [(decode, 1), (prompt, 9)]
    assert decode_order([prompt, decode]) == [decode]


def test_chunks_are_cut_from_what_is_left_in_order() -> None:
    seqs = [make_seq(1, behind=6), make_seq(2, behind=9, priority=-1), make_seq(3, behind=4)]
    assert split_budget(seqs, 12, 12) == [(seqs[1], 9), (seqs[0], 3)]
