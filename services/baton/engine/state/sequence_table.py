"""All living sequences of an engine: where each of them stands, and which request it belongs to. Every change
of state is made here."""

from collections.abc import Iterable

from baton.core.state_machines import SequenceState
from baton.engine.state.sequence import EngineSequence, SequenceRequest


class SequenceTable:
    """Each sequence stands in the one place that its state says. Blocks are no concern of the table: who
    moves a sequence sees to them.

    `queue`, `receiving` and `running` are by key, and for reading only.
    """

    def __init__(self) -> None:
        self.queue: dict[int, EngineSequence] = {}
        """WAITING or PREEMPTED: without blocks."""
        self.receiving: dict[int, EngineSequence] = {}
        self.running: dict[int, EngineSequence] = {}
        self._of_request: dict[int, list[EngineSequence]] = {}  # by the caller's seq_id; one until it forks
        self._last_key = 0

    @property
    def is_empty(self) -> bool:
        return not self._of_request

    def of_request(self, seq_id: int) -> tuple[EngineSequence, ...]:
        """Those that are left of what was added with that id; none if it is unknown or has ended."""
        return tuple(self._of_request.get(seq_id, ()))

    def all_by_request(self) -> Iterable[EngineSequence]:
        for seqs in self._of_request.values():
            yield from seqs

    def admitted(self) -> Iterable[EngineSequence]:
        """Those that have their blocks."""
        yield from self.running.values()
        yield from self.receiving.values()

    def prefills(self) -> Iterable[EngineSequence]:
        """Those of whose prompts something is still to be computed here."""
        yield from (seq for seq in self.queue.values() if not seq.waits_for_pull)
        yield from (seq for seq in self.running.values() if seq.num_uncomputed_tokens > 1)

    def add(self, request: SequenceRequest) -> None:
        """To the end of the queue."""
        key = self._new_key()
        seq = EngineSequence(request, key=key, arrival=key)
        self.queue[key] = seq
        self._of_request[seq.seq_id] = [seq]

    def start(self, seq: EngineSequence) -> None:
        """Out of the queue: it has its blocks, and lands in them if it waits for a pull."""
        del self.queue[seq.key]
        receives = seq.waits_for_pull
        seq.lifecycle.move(SequenceState.RECEIVING if receives else SequenceState.RUNNING)
        (self.receiving if receives else self.running)[seq.key] = seq

    def received(self, seq: EngineSequence) -> None:
        del self.receiving[seq.key]
        seq.lifecycle.move(SequenceState.RUNNING)
        self.running[seq.key] = seq

    def preempt(self, seq: EngineSequence) -> None:
        """Back into the queue."""
        del self.running[seq.key]
        seq.lifecycle.move(SequenceState.PREEMPTED)
        self.queue[seq.key] = seq

    def fork(self, seq: EngineSequence, sample_index: int) -> EngineSequence:
        """Another running sequence of the same request, for that sample, over the same tokens and blocks."""
        child = seq.fork(key=self._new_key(), sample_index=sample_index)
        self.running[child.key] = child
        self._of_request[child.seq_id].append(child)
        return child

    def end(self, seq: EngineSequence, state: SequenceState) -> None:
        """Out of everything."""
        seq.lifecycle.move(state)
        for place in (self.queue, self.receiving, self.running):
            place.pop(seq.key, None)
        siblings = self._of_request[seq.seq_id]
        siblings.remove(seq)
        if not siblings:
            del self._of_request[seq.seq_id]

    def _new_key(self) -> int:
        self._last_key += 1
        return self._last_key
