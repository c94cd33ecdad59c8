"""Makes one decision as a pure function: the policy, the SLO check, and the check of the workers' queues."""

from dataclasses import dataclass

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.scheduler.admission.slo_admission import AdmissionMode, check_slos, check_worker_queues
from baton.scheduler.policies.policy_types import Choice, Policy, PolicyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRules:
    """The scheduler's settings and state that a decision depends on, besides query and snapshot.

    decision_number: how many requests this scheduler has answered before.
    max_waiting_seqs: limit for the sequences waiting at a chosen worker.
    max_worker_queue_s: limit for the shortest predicted queue. None: requests cannot wait at the scheduler.
    ahead_s: predicted time until the requests queued before this one are placed.
    """

    decision_number: int
    admission: AdmissionMode = AdmissionMode.OFF
    max_waiting_seqs: int = 256
    max_worker_queue_s: float | None = None
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of `decide`.

    choice: None if the policy itself rejected the request.
    may_wait: the answer is a rejection only if the request cannot wait at the scheduler.
    """

    answer: Placement | Rejection
    choice: Choice | None
    may_wait: bool = False


def decide(
    decision_id: DecisionId,
    scheduler_id: str,
    policy_name: str,
    policy: Policy,
    query: PlacementQuery,
    cluster: ClusterSnapshot,
    rules: DecisionRules,
) -> Decision:
    """Place or reject one request.

    Equal arguments give equal decisions, as `decision_id` seeds all randomness.

    Raises ValueError if `decision_id` is not a hexadecimal number.
    """
    context = PolicyContext(
        number=rules.decision_number, seed=int(decision_id, 16), max_capacity_wait_s=rules.max_worker_queue_s
    )
    choice = policy(query, cluster, context)
    if isinstance(choice, Rejection):
        return Decision(answer=choice, choice=None, may_wait=choice.reason is Reason.NO_CAPACITY)
    slo_missed = check_slos(query, choice, mode=rules.admission, ahead_s=rules.ahead_s)
    if slo_missed is not None:
        return Decision(answer=slo_missed, choice=choice)
    queues_full = check_worker_queues(
        query, choice, max_waiting_seqs=rules.max_waiting_seqs, max_worker_queue_s=rules.max_worker_queue_s
    )
    if queues_full is not None:
        return Decision(answer=queues_full, choice=choice, may_wait=True)
    return Decision(answer=choice.placement(decision_id, scheduler_id, policy_name), choice=choice)
