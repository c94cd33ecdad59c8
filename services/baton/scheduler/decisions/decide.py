"""One decision, from beginning to end, as a pure function: policy, admission, and whether the request should
wait here first."""

from dataclasses import dataclass

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.errors import Reason
from baton.core.ids import DecisionId
from baton.scheduler.admission.slo_admission import AdmissionMode, admit, no_turn_yet
from baton.scheduler.policies.policy_result import Choice, Policy, PolicyContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRules:
    """What else a decision goes by: the scheduler's settings, the number of its turn, and `ahead_s`: of
    prompts that wait at the scheduler for their turn before this one, a worker's share. `max_worker_queue_s`
    None: nobody waits at the scheduler."""

    turn_number: int
    admission: AdmissionMode = AdmissionMode.OFF
    max_waiting_seqs: int = 256
    max_worker_queue_s: float | None = None
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`choice` None: the policy itself refused. `may_wait`: the answer is a refusal only if the request
    cannot wait at the scheduler."""

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
    """Randomness follows from `decision_id`, so that the same comes out again. Raises ValueError for an id
    that is no hexadecimal number."""
    turn = PolicyContext(number=rules.turn_number, seed=int(decision_id, 16), max_full_s=rules.max_worker_queue_s)
    choice = policy(query, cluster, turn)
    if isinstance(choice, Rejection):
        return Decision(answer=choice, choice=None, may_wait=choice.reason is Reason.NO_CAPACITY)
    refused = admit(query, choice, mode=rules.admission, ahead_s=rules.ahead_s)
    if refused is not None:
        return Decision(answer=refused, choice=choice)
    crowded = no_turn_yet(
        query, choice, max_waiting_seqs=rules.max_waiting_seqs, max_worker_queue_s=rules.max_worker_queue_s
    )
    if crowded is not None:
        return Decision(answer=crowded, choice=choice, may_wait=True)
    return Decision(answer=choice.placement(decision_id, scheduler_id, policy_name), choice=choice)
