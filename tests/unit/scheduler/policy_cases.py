"""Queries for policies, and helpers that read a choice."""

from baton.core.cluster.cluster_snapshot import ClusterSnapshot
from baton.core.cluster.placement import PlacementQuery
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.policy_types import Choice, PolicyContext, Prediction
from tests.builders import query
from tests.unit.scheduler.measured_workers import decoding, measured

LONG = 4096
NAMES = ["kv_centric", "prefix_aware"]


def context(number: int = 0, *, max_capacity_wait_s: float | None = None) -> PolicyContext:
    return PolicyContext(number=number, seed=number, max_capacity_wait_s=max_capacity_wait_s)


def asked(num_prompt_tokens: int = LONG, **changes: object) -> PlacementQuery:
    return query(num_prompt_tokens=num_prompt_tokens, max_tokens=100, **changes)


def chosen(
    cluster: ClusterSnapshot, asking: PlacementQuery | None = None, policy: str = "kv_centric", **changes: bool
) -> Choice:
    answer = POLICIES[policy](asking or asked(), cluster, context(**changes))
    assert isinstance(answer, Choice), answer
    return answer


def ids(choice: Choice) -> tuple[str | None, str | None]:
    return (choice.prefill.worker_id if choice.prefill else None, choice.decode.worker_id if choice.decode else None)


def predicted(choice: Choice) -> Prediction:
    assert choice.predicted is not None
    return choice.predicted


def busy(worker_id: str = "d", seqs: int = 20, **changes: object) -> object:
    """A decode worker with so many sequences that a local prefill costs too much."""
    return measured(worker_id, "decode", **decoding(seqs), **changes)
