"""The table of all sequences in an engine, by state and by request. Every state change is made here."""

from collections.abc import Iterable

from baton.core.state_machines import SequenceState
from baton.core.step_targets import LatencyTargets
from baton.engine.state.sequence import EngineSequence, ReloadWait, SequenceRequest


class SequenceTable:
    """Holds each sequence in the one dictionary that matches its state.

    `queue`, `receiving` and `running` map `key` to sequence, and are read-only for callers. The table does
    not handle blocks: the caller that moves a sequence must allocate or release them.
    """

    def __init__(self) -> None:
        self.queue: dict[int, EngineSequence] = {}  # WAITING or PREEMPTED: without blocks
        self.receiving: dict[int, EngineSequence] = {}
        self.running: dict[int, EngineSequence] = {}
        self._of_request: dict[int, list[EngineSequence]] = {}  # by the caller's seq_id; one until it forks
        self._last_key = 0

    @property
    def is_empty(self) -> bool:
        """True if there is no sequence."""
        return not self._of_request

    def of_request(self, seq_id: int) -> tuple[EngineSequence, ...]:
        """Return the remaining sequences of a request; empty if it is unknown or has ended."""
        return tuple(self._of_request.get(seq_id, ()))

    def all_by_request(self) -> Iterable[EngineSequence]:
        """Yield all sequences, found through their requests."""
        for seqs in self._of_request.values():
            yield from seqs

    def admitted(self) -> Iterable[EngineSequence]:
        """Yield the sequences that have blocks: running and receiving ones."""
        yield from self.running.values()
        yield from self.receiving.values()

    def prefills(self) -> Iterable[EngineSequence]:
        """Yield the sequences whose prompt is not computed completely, and that are computed here."""
        yield from (seq for seq in self.queue.values() if not seq.waits_for_pull)
        yield from (seq for seq in self.running.values() if seq.num_uncomputed_tokens > 1)

    def add(self, request: SequenceRequest, *, arrived_s: float, targets: LatencyTargets | None) -> None:
        """Create a sequence at the end of the queue."""
        key = self._new_key()
        seq = EngineSequence(request, key=key, arrival=key, arrived_s=arrived_s, targets=targets)
        self.queue[key] = seq
        self._of_request[seq.seq_id] = [seq]

    def start(self, seq: EngineSequence) -> None:
        """Move a queued sequence that got its blocks to RUNNING, or to RECEIVING if its KV is pulled."""
        del self.queue[seq.key]
        receives = seq.waits_for_pull
        seq.lifecycle.move(SequenceState.RECEIVING if receives else SequenceState.RUNNING)
        (self.receiving if receives else self.running)[seq.key] = seq

    def received(self, seq: EngineSequence) -> None:
        """Move a receiving sequence to RUNNING."""
        del self.receiving[seq.key]
        seq.lifecycle.move(SequenceState.RUNNING)
        self.running[seq.key] = seq

    def preempt(self, seq: EngineSequence) -> None:
        """Move a running sequence back to the queue. Its return may wait for a reload once more."""
        del self.running[seq.key]
        seq.lifecycle.move(SequenceState.PREEMPTED)
        seq.reload = ReloadWait.NOT_BEGUN
        self.queue[seq.key] = seq

    def fork(self, seq: EngineSequence, sample_index: int) -> EngineSequence:
        """Create a running sequence for one sample of `seq`, with the same tokens and blocks."""
        child = seq.fork(key=self._new_key(), sample_index=sample_index)
        self.running[child.key] = child
        self._of_request[child.seq_id].append(child)
        return child

    def end(self, seq: EngineSequence, state: SequenceState) -> None:
        """Remove a sequence, with `state` as its final state."""
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
