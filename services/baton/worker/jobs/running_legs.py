"""Routes engine outcomes to the legs of running jobs, by sequence id."""

from collections.abc import ValuesView

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.outcome import EngineOutcome
from baton.worker.jobs.leg import Leg


class RunningLegs:
    """The legs that have not ended, by `seq_id`.

    Built before the engine loop, which delivers its outcomes here.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._legs: dict[int, Leg] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def add(self, leg: Leg) -> None:
        self._legs[leg.seq_id] = leg

    def remove(self, leg: Leg) -> None:
        """Stop delivering to `leg`. Does nothing if it is not here."""
        self._legs.pop(leg.seq_id, None)

    def values(self) -> ValuesView[Leg]:
        return self._legs.values()

    def deliver(self, outcome: EngineOutcome) -> None:
        """Pass the outcome of a plan or a step to the legs.

        Outcomes of sequences whose job has ended are dropped; blocks that such a sequence received are freed.
        """
        for admission in outcome.admissions:
            self._pool.count_use(admission.cached_block_ids)
            leg = self._legs.get(admission.seq_id)
            if leg is not None:
                leg.admitted(admission)
            elif admission.receiving_block_ids:
                self._pool.drop_receiving(admission.receiving_block_ids)
        for growth in outcome.growths:
            leg = self._legs.get(growth.seq_id)
            if leg is not None:
                leg.grown(growth)
        for progress in outcome.progress:
            leg = self._legs.get(progress.seq_id)
            if leg is not None:
                leg.progressed(progress)
        for output in outcome.outputs:
            leg = self._legs.get(output.seq_id)
            if leg is not None:
                leg.produced(output)
