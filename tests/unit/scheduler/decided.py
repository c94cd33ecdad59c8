"""Decisions of the scheduler about a small cluster."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery
from baton.core.ids import DecisionId
from baton.scheduler.admission.slo_admission import AdmissionMode
from baton.scheduler.decisions import decide as decide_module
from baton.scheduler.decisions.decide import DecisionRules
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.policies import POLICIES
from tests.unit.scheduler.measured_workers import decoding, fast_link, measured, queued, seen


def decide(
    asking: PlacementQuery,
    cluster: ClusterSnapshot,
    policy: str = "kv_centric",
    decision_id: str = "c0ffee",
    rules: DecisionRules | None = None,
) -> UnrecordedDecision:
    """Decide as the scheduler does."""
    rules = rules or DecisionRules(decision_number=3, admission=AdmissionMode.PREDICTIVE)
    verdict = decide_module.decide(DecisionId(decision_id), "s", policy, POLICIES[policy], asking, cluster, rules)
    return UnrecordedDecision(
        decision_id=DecisionId(decision_id),
        scheduler_id="s",
        policy=policy,
        query=asking,
        answer=verdict.answer,
        choice=verdict.choice,
        cluster=cluster,
        rules=rules,
    )


def many(number: int) -> ClusterSnapshot:
    links = tuple(fast_link(f"p{i:02}") for i in range(number))
    prefills = [measured(f"p{i:02}", "prefill", **queued(100 * i)) for i in range(number)]
    return seen(
        *prefills, *(measured(f"d{i:02}", "decode", **decoding(10 + i), links=links) for i in range(number)), p07=20
    )
