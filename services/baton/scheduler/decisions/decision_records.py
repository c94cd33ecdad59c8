"""Builds decision records, and repeats decisions from them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, Overlap, WorkerView
from baton.core.cluster.decision_record import Candidate, DecisionRecord, MissingPrefix, SessionTurn
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId
from baton.core.plain_json import from_plain, to_plain
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.policies import POLICIES, Policy
from baton.scheduler.policies.eligibility import Exclusion
from baton.scheduler.policies.policy_types import Choice
from baton.scheduler.state.worker_links import fastest_link

MAX_CANDIDATES = 8


class RecordedOverlap(NamedTuple):
    """An `Overlap` that was read from a record."""

    num_blocks: int
    num_held_blocks: int
    num_reloaded_blocks: int = 0
    num_disk_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedDecision:
    """A decision with references to its inputs.

    Its record is built later, because that takes longer than deciding.

    choice: None if the policy itself rejected the request.
    missing, session: see `DecisionRecord`.
    cluster: None if the answer does not depend on the cluster. The decision cannot be repeated then.
    """

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    query: PlacementQuery
    answer: Placement | Rejection
    choice: Choice | None
    cluster: ClusterSnapshot | None
    rules: DecisionRules
    missing: MissingPrefix | None = None
    session: SessionTurn | None = None

    def to_record(self) -> DecisionRecord:
        """Build the record. Takes a few hundred microseconds."""
        candidates = self.choice.candidates if self.choice is not None else ()
        record = build_record(self.decision_id, self.scheduler_id, self.policy, self.query, self.answer, candidates)
        record = replace(record, missing=self.missing, session=self.session)
        if self.cluster is None:
            return record
        return replace(record, inputs=_inputs(self, self.cluster, record.candidates))

    def without_inputs(self) -> "UnrecordedDecision":
        """Return a copy that holds only the answer, which frees the snapshot."""
        return replace(self, query=replace(self.query, block_hashes=(), prefix_key=b""), choice=None, cluster=None)


def build_record(
    decision_id: DecisionId,
    scheduler_id: str,
    policy: str,
    query: PlacementQuery,
    answer: Placement | Rejection,
    candidates: Sequence[Candidate],
) -> DecisionRecord:
    """Build a record with at most `MAX_CANDIDATES` candidates, the chosen ones first.

    The others are counted by the reason of their exclusion. Hashes of the prompt are left out to keep the
    record small.
    """
    placed = answer if isinstance(answer, Placement) else None
    chosen = {w.worker_id for w in (placed.prefill, placed.decode) if w is not None} if placed else set()
    eligible = sorted((c for c in candidates if not c.excluded), key=lambda c: c.worker.worker_id not in chosen)
    excluded = Counter(c.excluded for c in candidates if c.excluded)
    if len(eligible) > MAX_CANDIDATES:
        excluded[Exclusion.SLOWER.value] += len(eligible) - MAX_CANDIDATES
    return DecisionRecord(
        decision_id=decision_id,
        scheduler_id=scheduler_id,
        policy=policy,
        request_id=query.request_id,
        attempt=query.attempt,
        query=replace(query, block_hashes=(), prefix_key=b""),
        placement=placed,
        rejection=answer if isinstance(answer, Rejection) else None,
        candidates=tuple(eligible[:MAX_CANDIDATES]),
        num_excluded=dict(excluded),
    )


def repeat_decision(record: DecisionRecord, policies: Mapping[str, Policy] = POLICIES) -> Placement | Rejection:
    """Decide again from a record alone.

    policies: by name. A policy of another module is never imported because a record names it.

    Raises ValueError if the policy is not known here, or if the inputs are missing or come from another
    release.
    """
    policy = policies.get(record.policy)
    if policy is None:
        raise ValueError(f"policy {record.policy!r} is unknown; must be one of {', '.join(policies)}")
    if not record.inputs:
        raise ValueError(f"decision {record.decision_id} cannot be repeated: its inputs were not recorded")
    cluster, rules = _from_inputs(json.loads(record.inputs))
    return decide(record.decision_id, record.scheduler_id, record.policy, policy, record.query, cluster, rules).answer


def _inputs(decision: UnrecordedDecision, cluster: ClusterSnapshot, candidates: Sequence[Candidate]) -> str:
    """Return the JSON text of the rules and the workers that determined the decision.

    These are the workers of the choice's basis and the recorded candidates, or all workers without a basis.
    The others can be left out: the best of all workers is also the best of any subset that contains it.
    """
    choice = decision.choice
    if choice is None or choice.basis is None:
        recorded = pullable = {w.worker_id for w in cluster.workers}
    else:
        recorded = {*choice.basis, *(c.worker.worker_id for c in candidates)}
        pullable = set(choice.holders)  # a worker that was not considered as a source must not be considered again
    layouts: list[Any] = []
    workers = []
    for view in cluster.workers:
        if view.worker_id not in recorded:
            continue
        fastest = fastest_link(view.report.links)
        links = tuple(link for link in view.report.links if link.peer.worker_id in recorded or link is fastest)
        plain = to_plain(replace(view, report=replace(view.report, links=links, counted_decision_ids=())))
        layout = plain["report"]["layout"]  # mostly the same for all workers
        if layout not in layouts:
            layouts.append(layout)
        plain["report"]["layout"] = layouts.index(layout)
        workers.append(plain)
    max_cached_tokens = max(0, decision.query.num_prompt_tokens - 1)
    overlaps = {
        view.worker_id: _numbers_of(
            overlap,
            is_source=view.worker_id in pullable,
            max_blocks=max_cached_tokens // view.report.layout.block_size_tokens,
        )
        for view in cluster.workers
        if view.worker_id in recorded and (overlap := cluster.overlaps.get(view.worker_id)) is not None
    }
    inputs = {"rules": to_plain(decision.rules), "layouts": layouts, "workers": workers, "overlaps": overlaps}
    return json.dumps(inputs, separators=(",", ":"))


def _numbers_of(overlap: Overlap, *, is_source: bool, max_blocks: int) -> tuple[int, ...]:
    """Return the fields of the `RecordedOverlap` of a worker.

    is_source: it may be pulled from; otherwise it holds nothing for others
    max_blocks: blocks of the prompt that may come from a cache. What it holds beyond is not reloaded.
    """
    num_held = overlap.num_held_blocks
    if is_source:
        return overlap.num_blocks, num_held, overlap.num_reloaded_blocks, overlap.num_disk_blocks
    num_beyond = max(0, num_held - max_blocks)
    reloaded, on_disk = overlap.num_reloaded_blocks - num_beyond, overlap.num_disk_blocks - num_beyond
    return overlap.num_blocks, 0, max(0, reloaded), max(0, on_disk)


def _from_inputs(inputs: Mapping[str, Any]) -> tuple[ClusterSnapshot, DecisionRules]:
    """Read what `_inputs` wrote. Raises ValueError for anything else."""
    try:
        layouts, plain = inputs["layouts"], inputs["workers"]
        workers = [each | {"report": each["report"] | {"layout": layouts[each["report"]["layout"]]}} for each in plain]
        overlaps = {worker_id: RecordedOverlap(*numbers) for worker_id, numbers in inputs["overlaps"].items()}
        rules = from_plain(DecisionRules, inputs["rules"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the inputs of the decision are malformed or of another release: {error!r}") from error
    return ClusterSnapshot(workers=tuple(from_plain(WorkerView, each) for each in workers), overlaps=overlaps), rules
