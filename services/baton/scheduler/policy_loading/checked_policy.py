"""Checks each answer of a policy that is not part of Baton, so that a bug in it fails one request only."""

import math
from collections.abc import Callable
from typing import Any

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate
from baton.core.cluster.placement import PlacementQuery, Rejection
from baton.core.errors import Code, Failure, Reason, Refused
from baton.runtime.logging import get_logger
from baton.scheduler.policies.eligibility import Side, ineligible
from baton.scheduler.policies.policy_types import Choice, LazyCandidates, Policy, PolicyContext

log = get_logger(__name__)


class InvalidAnswer(Exception):
    """A policy's answer breaks a rule that the services rely on."""


def checked(function: Callable[..., Any]) -> Policy:
    """Return a policy that calls `function` and raises InvalidAnswer if its answer cannot be used."""

    def policy(query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext) -> Choice | Rejection:
        answer = function(query, cluster, context)
        if isinstance(answer, Rejection):
            return answer
        if not isinstance(answer, Choice):
            raise InvalidAnswer(f"it returned {answer!r:.100}; must return a Choice or a Rejection")
        _check_workers(answer, query, cluster)
        _check_candidates(answer)
        return answer

    return policy


def contained(name: str, policy: Policy) -> Policy:
    """Return `policy` with its exceptions logged. The request gets 500, and the scheduler goes on."""
    failure = Failure(
        code=Code.INTERNAL,
        reason=Reason.INTERNAL,
        message=f"the scheduling policy {name} failed: see `policy_failed` in the scheduler's log",
    )

    def policy_with_failures(
        query: PlacementQuery, cluster: ClusterSnapshot, context: PolicyContext
    ) -> Choice | Rejection:
        try:
            return policy(query, cluster, context)
        except Exception as error:
            log.exception("policy_failed", policy=name, request=query.request_id.hex())
            raise Refused(failure) from error

    return policy_with_failures


def _check_workers(choice: Choice, query: PlacementQuery, cluster: ClusterSnapshot) -> None:
    if choice.prefill is None and choice.decode is None:
        raise InvalidAnswer("it chose no worker; must choose one, or return a Rejection")
    if choice.prefill is not None and choice.decode is not None and choice.prefill.worker_id == choice.decode.worker_id:
        raise InvalidAnswer(
            f"it chose {choice.prefill.worker_id!r} for both sides; for a worker that does both, prefill is None"
        )
    _check_worker(choice.prefill, "prefill", query, cluster)
    _check_worker(choice.decode, "decode", query, cluster)


def _check_worker(worker: WorkerView | None, side: Side, query: PlacementQuery, cluster: ClusterSnapshot) -> None:
    if worker is None:
        return
    if not any(worker is each for each in cluster.workers):
        raise InvalidAnswer(f"it chose {worker!r:.100} to {side}, which is none of cluster.workers")
    why = ineligible(worker, query, side)
    if why is not None and not why.is_soft:
        raise InvalidAnswer(f"it chose {worker.worker_id!r} to {side}, which cannot: {why.value}")


def _check_candidates(choice: Choice) -> None:
    """Check what goes into the decision record. `LazyCandidates` are built later, by Baton's own policies."""
    if isinstance(choice.candidates, LazyCandidates):
        return
    for candidate in choice.candidates:
        if not isinstance(candidate, Candidate):
            raise InvalidAnswer(f"candidates contains {candidate!r:.100}; must contain Candidate only")
        for term, value in candidate.terms.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise InvalidAnswer(f"term {term!r} of a candidate is {value!r}; must be a finite int or float")
