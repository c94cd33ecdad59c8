"""Decision records: what was decided, from what, and what came of it; and how to decide it again from its
record."""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from baton.core.cluster.cluster_snapshot import ClusterSnapshot, WorkerView
from baton.core.cluster.decision_record import Candidate, DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import RequestActuals
from baton.scheduler.decisions.decide import DecisionRules, decide
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.policy_result import SLOWER, Choice
from baton.scheduler.state.worker_table import fastest

MAX_CANDIDATES = 8
MAX_RECORDS = 4_096
MAX_UNTOLD = 256
"""Decisions that are kept with all that they were made from, until somebody has had the time to write their
record."""


class RecordedOverlap(NamedTuple):
    """See `core.cluster.Overlap`."""

    num_blocks: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision just made, by reference: writing its record takes longer than deciding, and is done later.
    `choice` None: the policy itself refused. `cluster` None: it did not come of what the cluster is like, and
    cannot be repeated."""

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    query: PlacementQuery
    answer: Placement | Rejection
    choice: Choice | None
    cluster: ClusterSnapshot | None
    rules: DecisionRules

    def record(self) -> DecisionRecord:
        """A few hundred microseconds."""
        candidates = self.choice.candidates if self.choice is not None else ()
        made = record_of(self.decision_id, self.scheduler_id, self.policy, self.query, self.answer, candidates)
        if self.cluster is None:
            return made
        basis = self.choice.basis if self.choice is not None else None
        return replace(made, inputs=_inputs(self.cluster, self.rules, basis, made.candidates))

    def answer_alone(self) -> "Decided":
        """Without what it was made from."""
        return replace(self, query=replace(self.query, block_hashes=()), choice=None, cluster=None)


def record_of(
    decision_id: DecisionId,
    scheduler_id: str,
    policy: str,
    query: PlacementQuery,
    answer: Placement | Rejection,
    candidates: Sequence[Candidate],
) -> DecisionRecord:
    """At most `MAX_CANDIDATES` candidates that could have been chosen, the policy's order kept, and counts of
    why the others were not. The query's block hashes stay behind: a record must be small."""
    placed = answer if isinstance(answer, Placement) else None
    chosen = {w.worker_id for w in (placed.prefill, placed.decode) if w is not None} if placed else set()
    able = sorted((c for c in candidates if not c.excluded), key=lambda c: c.worker.worker_id not in chosen)
    excluded = Counter(c.excluded for c in candidates if c.excluded)
    if len(able) > MAX_CANDIDATES:
        excluded[SLOWER] += len(able) - MAX_CANDIDATES
    return DecisionRecord(
        decision_id=decision_id,
        scheduler_id=scheduler_id,
        policy=policy,
        request_id=query.request_id,
        attempt=query.attempt,
        query=replace(query, block_hashes=()),
        placement=placed,
        rejection=answer if isinstance(answer, Rejection) else None,
        candidates=tuple(able[:MAX_CANDIDATES]),
        num_excluded=dict(excluded),
    )


def repeat(record: DecisionRecord) -> Placement | Rejection:
    """Decide again, from the record alone. Raises ValueError where it was made by a policy or release that is
    not known here, or without its inputs."""
    policy = POLICIES.get(record.policy)
    if policy is None or not record.inputs:
        raise ValueError(
            f"this decision of {record.policy!r} cannot be repeated: its policy is unknown or its inputs were not kept"
        )
    cluster, rules = _from_inputs(json.loads(record.inputs))
    return decide(record.decision_id, record.scheduler_id, record.policy, policy, record.query, cluster, rules).answer


@dataclass(slots=True)
class _Known:
    """`record` None: not told yet."""

    decided: Decided
    record: DecisionRecord | None = None
    actuals: dict[str, object] = field(default_factory=dict)


class RecentDecisions:
    """The last `MAX_RECORDS` decisions of this scheduler, so that explaining a fresh request needs no
    store."""

    def __init__(self) -> None:
        self._known: OrderedDict[DecisionId, _Known] = OrderedDict()
        self._untold: OrderedDict[DecisionId, None] = OrderedDict()

    def decided(self, decided: Decided) -> None:
        """Remember a decision, whose record is to be made when there is time (`tell`), or when somebody asks.
        Of too many that nobody had time for only the answers stay."""
        self._known[decided.decision_id] = _Known(decided)
        self._untold[decided.decision_id] = None
        if len(self._untold) > MAX_UNTOLD:
            late = self._known[self._untold.popitem(last=False)[0]]
            late.decided = late.decided.answer_alone()
        if len(self._known) > MAX_RECORDS:
            oldest, _ = self._known.popitem(last=False)
            self._untold.pop(oldest, None)

    def tell(self, decision_id: DecisionId) -> DecisionRecord | None:
        """The whole record, with what came of it, or None if the decision has been forgotten."""
        known = self._known.get(decision_id)
        if known is None:
            return None
        self._untold.pop(decision_id, None)
        if known.record is None:
            known.record = known.decided.record()
            known.decided = known.decided.answer_alone()
        return replace(known.record, actuals=known.actuals)

    def finish(self, actuals: RequestActuals) -> bool:
        """A request has ended so. False if its decision has been forgotten."""
        known = self._known.get(actuals.decision_id)
        if known is not None:
            known.actuals = _as_dict(actuals)
        return known is not None

    def of_request(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """The records of one request by attempt; of the request decided last for None."""
        if request_id is None:
            if not self._known:
                return ()
            request_id = next(reversed(self._known.values())).decided.query.request_id
        ids = [
            decision_id for decision_id, known in self._known.items() if known.decided.query.request_id == request_id
        ]
        return tuple(sorted((r for r in map(self.tell, ids) if r is not None), key=lambda r: r.attempt))


def _as_dict(actuals: RequestActuals) -> dict[str, object]:
    return {
        "outcome": actuals.outcome,
        "ttft_s": actuals.ttft_s,
        "tpot_s": actuals.tpot_s,
        "num_output_tokens": actuals.num_output_tokens,
        "num_cached_tokens": actuals.num_cached_tokens,
        "legs": [{name: getattr(leg, name) for name in leg.__dataclass_fields__} for leg in actuals.legs],
    }


def _inputs(
    cluster: ClusterSnapshot, rules: DecisionRules, basis: Sequence[str] | None, candidates: Sequence[Candidate]
) -> str:
    """`rules` and the workers that made the difference, with the candidates that are told of; all workers
    where all did. Of the others nothing is needed: the best of all is the best of some, if it is among
    them."""
    wanted = (
        {w.worker_id for w in cluster.workers} if basis is None else {*basis, *(c.worker.worker_id for c in candidates)}
    )
    layouts: list[Any] = []
    workers = []
    for view in cluster.workers:
        if view.worker_id not in wanted:
            continue
        standard = fastest(view.report.links)
        links = tuple(link for link in view.report.links if link.peer.worker_id in wanted or link is standard)
        plain = to_plain(replace(view, report=replace(view.report, links=links, counted_decision_ids=())))
        layout = plain["report"]["layout"]  # one for all, mostly
        if layout not in layouts:
            layouts.append(layout)
        plain["report"]["layout"] = layouts.index(layout)
        workers.append(plain)
    # Whose prefix nobody thought of pulling is not thought of again.
    pullable = wanted if basis is None else set(basis)
    overlaps = {
        worker_id: [overlap.num_blocks, overlap.num_held_blocks if worker_id in pullable else 0]
        for worker_id, overlap in cluster.overlaps.items()
        if worker_id in wanted
    }
    made = {"rules": to_plain(rules), "layouts": layouts, "workers": workers, "overlaps": overlaps}
    return json.dumps(made, separators=(",", ":"))


def _from_inputs(inputs: Mapping[str, Any]) -> tuple[ClusterSnapshot, DecisionRules]:
    """Raises ValueError for what `_inputs` did not make."""
    try:
        layouts, plain = inputs["layouts"], inputs["workers"]
        workers = [each | {"report": each["report"] | {"layout": layouts[each["report"]["layout"]]}} for each in plain]
        overlaps = {worker_id: RecordedOverlap(*numbers) for worker_id, numbers in inputs["overlaps"].items()}
        rules = from_plain(DecisionRules, inputs["rules"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"these are no inputs of a decision: {error!r}") from error
    return ClusterSnapshot(workers=tuple(from_plain(WorkerView, each) for each in workers), overlaps=overlaps), rules
