"""Small placements that every policy must be able to make, tried before a scheduler starts."""

import json
from dataclasses import dataclass, replace

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.placement import PlacementQuery
from baton.core.cluster.worker_report import BlockCounts, WorkerReport, WorkerRole, WorkerState
from baton.core.ids import DecisionId, WorkerRef
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup
from baton.core.plain_json import to_plain
from baton.core.request import Slo
from baton.core.step_cost import StepCostModel
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.policies.policy_types import Policy
from baton.scheduler.policy_loading.checked_policy import InvalidAnswer

MODEL = "trial"
SCHEDULER = "trial"
DECISION = DecisionId("0123456789abcdef")
LAYOUT = KvLayout(
    model_fingerprint=MODEL,
    tokenizer_fingerprint=MODEL,
    block_size_tokens=16,
    groups=(
        LayerGroup(
            layer_begin=0,
            num_layers=2,
            components=tuple(
                KvComponent(name=name, num_kv_heads=2, head_dim=8, dtype="bfloat16") for name in ("k", "v")
            ),
        ),
    ),
)
COSTS = StepCostModel.of((2e-3, 1e-4, 2e-9, 5e-4, 1e-7, 1e-4))
QUERY = PlacementQuery(
    request_id=bytes(16), attempt=0, model=MODEL, num_prompt_tokens=100, max_tokens=20, slo=Slo(ttft_s=1.0, tpot_s=0.1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlacement:
    """One question with the cluster that it is asked about."""

    description: str
    cluster: ClusterSnapshot
    query: PlacementQuery = QUERY


def place_on_trial(name: str, policy: Policy, trial: TrialPlacement) -> None:
    """Make one decision as a scheduler does, twice, and build its record.

    Raises InvalidAnswer if the two differ, and whatever the policy raises.
    """
    rules = DecisionRules(decision_number=0, max_worker_queue_s=1.0)
    first, again = (decide(DECISION, SCHEDULER, name, policy, trial.query, trial.cluster, rules) for _ in range(2))
    if first != again:
        raise InvalidAnswer(
            "it answered the same question differently; must be a pure function (draw from context.seed)"
        )
    decision = UnrecordedDecision(
        decision_id=DECISION,
        scheduler_id=SCHEDULER,
        policy=name,
        query=trial.query,
        answer=first.answer,
        choice=first.choice,
        cluster=trial.cluster,
        rules=rules,
    )
    json.dumps(to_plain(decision.to_record()))


def _worker(name: str, role: WorkerRole, *, free: int = 1000, costs: StepCostModel | None = COSTS) -> WorkerView:
    return WorkerView(
        report=WorkerReport(
            worker=WorkerRef(worker_id=name, worker_epoch=1, address=f"{name}:1"),
            report_seq=1,
            role=role,
            state=WorkerState.READY,
            model=MODEL,
            layout=LAYOUT,
            blocks=BlockCounts(total=1000, free=free, cached=0, used=1000 - free, receiving=0, quarantined=0),
            max_model_len=4096,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            mean_output_tokens=100.0,
            costs=costs,
        )
    )


_D, _H, _P = (_worker(f"{role.value}-0", role) for role in (WorkerRole.DECODE, WorkerRole.HYBRID, WorkerRole.PREFILL))
_THREE = ClusterSnapshot(workers=(_D, _H, _P))

TRIALS = (
    TrialPlacement(description="a prefill, a decode and a hybrid worker", cluster=_THREE),
    TrialPlacement(description="a request for one token", cluster=_THREE, query=replace(QUERY, max_tokens=1)),
    TrialPlacement(description="only a hybrid worker", cluster=ClusterSnapshot(workers=(_H,))),
    TrialPlacement(description="no decode worker", cluster=ClusterSnapshot(workers=(_P,))),
    TrialPlacement(description="no workers", cluster=ClusterSnapshot(workers=())),
    TrialPlacement(
        description="full workers",
        cluster=ClusterSnapshot(
            workers=tuple(_worker(f"{role.value}-0", role, free=0) for role in (WorkerRole.DECODE, WorkerRole.PREFILL))
        ),
    ),
    TrialPlacement(
        description="workers that have not measured themselves",
        cluster=ClusterSnapshot(
            workers=tuple(
                _worker(f"{role.value}-0", role, costs=None) for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
            )
        ),
    ),
)
"""Workers are sorted by id, as in every snapshot."""
