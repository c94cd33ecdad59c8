"""Defines what a scheduling policy gets and returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId
from baton.core.messages.jobs import PrefixSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """Inputs of a policy besides the query and the snapshot.

    number: how many requests this scheduler has answered before.
    seed: seed for a policy that draws at random.
    max_capacity_wait_s: a first attempt that fits on no worker now, and is predicted to fit on none within
        this time, is rejected and waits at the scheduler. None: it is placed on a full worker and waits
        there.
    """

    number: int
    seed: int
    max_capacity_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds of one choice.

    transfer_s: time between the first token and the last KV block at the decode worker.
    tpot_s: once the prompt is computed. tpot_now_s: if it were computed already.
    least_queue_s: shortest queue of all candidates.
    answer_s: time from the first token to the last.
    idle_tpot_s: TPOT without other sequences, with as many tokens a step from drafts as now.
    decode_drain_s: time in which all but 1/e of the other sequences end.

    Admission derives from the last three when a rejected request would be admitted.
    """

    queue_s: float
    prefix_pull_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    least_queue_s: float
    tpot_s: float | None = None
    tpot_now_s: float | None = None
    answer_s: float | None = None
    idle_tpot_s: float = 0.0
    decode_drain_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The workers that a policy chose for one request.

    prefill, decode: see `Placement` for the meaning of None.
    candidates: the workers that were considered, for the decision record.
    predicted: None if the policy predicts no seconds.
    basis: ids of the workers that determined the choice. The record keeps their state so that the decision
        can be repeated. None: all workers.
    holders: ids of those workers of `basis` whose own prefix, which others can pull, was considered.
    """

    prefill: WorkerView | None
    decode: WorkerView | None
    candidates: Sequence[Candidate] = ()
    predicted: Prediction | None = None
    prefix_source: PrefixSource | None = None
    prefill_overlap_blocks: int = 0
    decode_overlap_blocks: int = 0
    basis: tuple[str, ...] | None = None
    holders: tuple[str, ...] = ()

    def placement(self, decision_id: DecisionId, scheduler_id: str, policy: str) -> Placement:
        """Return the answer that the gateway gets for this choice."""
        p = self.predicted
        return Placement(
            decision_id=decision_id,
            scheduler_id=scheduler_id,
            policy=policy,
            prefill=self.prefill.worker if self.prefill else None,
            decode=self.decode.worker if self.decode else None,
            prefix_source=self.prefix_source,
            queue_s=p.queue_s if p else None,
            prefix_pull_s=p.prefix_pull_s if p else None,
            prefill_s=p.prefill_s if p else None,
            transfer_s=p.transfer_s if p else None,
            ttft_s=p.ttft_s if p else None,
            tpot_s=p.tpot_s if p else None,
            answer_s=p.answer_s if p else None,
            prefill_overlap_blocks=self.prefill_overlap_blocks,
            decode_overlap_blocks=self.decode_overlap_blocks,
        )


Policy = Callable[[PlacementQuery, ClusterSnapshot, PolicyContext], Choice | Rejection]
"""A pure function: equal arguments give equal answers. It uses no clock, lock, log or global state."""


class LazyCandidates(Sequence[Candidate]):
    """Candidates that are built on first access, as explaining a decision takes longer than making it."""

    def __init__(self, make: Callable[[], tuple[Candidate, ...]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> tuple[Candidate, ...]:
        return self._make()

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    __hash__ = None  # type: ignore[assignment]
