"""Decision records: what was decided, from what, and what came of it; and how to decide it again from its record."""

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from baton.core.cluster import Candidate, ClusterSnapshot, DecisionRecord, Placement, PlacementQuery, Rejection, WorkerView
from baton.core.ids import DecisionId
from baton.core.plain import from_plain, to_plain
from baton.core.request import RequestActuals
from baton.scheduler.admission import Admission, admit
from baton.scheduler.columns import fastest
from baton.scheduler.policies import POLICIES
from baton.scheduler.policies.choice import SLOWER, Choice, Turn

MAX_CANDIDATES = 8
MAX_RECORDS = 4_096
MAX_UNTOLD = 256
"""Decisions that are kept with all that they were made from, until somebody has had the time to write their record."""


class RecordedOverlap(NamedTuple):
    """See `core.cluster.Overlap`."""

    num_blocks: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What else a decision goes by: the scheduler's settings and the number of its turn."""

    turn_number: int
    refuse_full: bool = False
    admission: Admission = Admission.OFF
    max_waiting_seqs: int = 256


def turn_of(decision_id: DecisionId, rules: Rules) -> Turn:
    """The randomness of a decision follows from its id, so that its record is enough to repeat it. Raises ValueError for an id that is no
    hexadecimal number."""
    return Turn(number=rules.turn_number, rng=Random(int(decision_id, 16)), refuse_full=rules.refuse_full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision just made, by reference: writing its record takes longer than deciding, and is done later. `choice` None: the policy
    itself refused."""

    decision_id: DecisionId
    scheduler_id: str
    policy: str
    query: PlacementQuery
    answer: Placement | Rejection
    choice: Choice | None
    cluster: ClusterSnapshot
    rules: Rules

    def record(self) -> DecisionRecord:
        """A few hundred microseconds."""
        candidates = self.choice.candidates if self.choice is not None else ()
        made = record_of(self.decision_id, self.scheduler_id, self.policy, self.query, self.answer, candidates)
        basis = self.choice.basis if self.choice is not None else None
        return replace(made, inputs=_inputs(self.cluster, self.rules, basis, made.candidates))

    def outline(self) -> DecisionRecord:
        """The answer alone, at once."""
        return record_of(self.decision_id, self.scheduler_id, self.policy, self.query, self.answer, ())


def record_of(
    decision_id: DecisionId,
    scheduler_id: str,
    policy: str,
    query: PlacementQuery,
    answer: Placement | Rejection,
    candidates: Sequence[Candidate],
) -> DecisionRecord:
    """At most `MAX_CANDIDATES` candidates that could have been chosen, the policy's order kept, and counts of why the others were not.
    The query's block hashes stay behind: a record must be small."""
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
    """Decide again, from the record alone. Raises ValueError where it was made by a policy or release that is not known here, or without
    its inputs."""
    policy = POLICIES.get(record.policy)
    if policy is None or not record.inputs:
        raise ValueError(f"this decision of {record.policy!r} cannot be repeated: its policy is unknown or its inputs were not kept")
    cluster, rules = _from_inputs(json.loads(record.inputs))
    choice = policy(record.query, cluster, turn_of(record.decision_id, rules))
    if isinstance(choice, Rejection):
        return choice
    refused = admit(record.query, choice, max_waiting_seqs=rules.max_waiting_seqs, mode=rules.admission)
    return refused or choice.placement(record.decision_id, record.scheduler_id, record.policy)


class RecentDecisions:
    """The last `MAX_RECORDS` decisions of this scheduler, so that explaining a fresh request needs no store."""

    def __init__(self) -> None:
        self._records: OrderedDict[DecisionId, DecisionRecord] = OrderedDict()
        self._untold: OrderedDict[DecisionId, Decided] = OrderedDict()

    def put(self, record: DecisionRecord) -> None:
        self._untold.pop(record.decision_id, None)
        self._records[record.decision_id] = record
        self._records.move_to_end(record.decision_id)
        while len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def decided(self, decided: Decided) -> None:
        """Remember a decision, whose record is to be made when there is time (`tell`), or when somebody asks. Of too many that nobody had
        time for only the answers stay."""
        self.put(decided.outline())
        self._untold[decided.decision_id] = decided
        while len(self._untold) > MAX_UNTOLD:
            self._untold.popitem(last=False)

    def tell(self, decision_id: DecisionId) -> DecisionRecord | None:
        """The whole record, or None if the decision has been forgotten."""
        known = self._records.get(decision_id)
        decided = self._untold.pop(decision_id, None)
        if known is None or decided is None:
            return known
        told = replace(decided.record(), actuals=known.actuals)
        self._records[decision_id] = told
        return told

    def placement(self, decision_id: DecisionId) -> Placement | None:
        known = self._records.get(decision_id)
        return known.placement if known is not None else None

    def finish(self, actuals: RequestActuals) -> DecisionRecord | None:
        """The record, as far as it is told, with what really happened; None if it has been forgotten."""
        record = self._records.get(actuals.decision_id)
        if record is None:
            return None
        done = replace(record, actuals=_as_dict(actuals))
        self._records[actuals.decision_id] = done
        return done

    def of_request(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """The records of one request by attempt; of the request decided last for None."""
        if request_id is None:
            if not self._records:
                return ()
            request_id = next(reversed(self._records.values())).request_id
        found = [self.tell(r.decision_id) or r for r in tuple(self._records.values()) if r.request_id == request_id]
        return tuple(sorted(found, key=lambda r: r.attempt))


def _as_dict(actuals: RequestActuals) -> dict[str, object]:
    return {
        "outcome": actuals.outcome,
        "ttft_s": actuals.ttft_s,
        "tpot_s": actuals.tpot_s,
        "num_output_tokens": actuals.num_output_tokens,
        "num_cached_tokens": actuals.num_cached_tokens,
        "legs": [{name: getattr(leg, name) for name in leg.__dataclass_fields__} for leg in actuals.legs],
    }


def _inputs(cluster: ClusterSnapshot, rules: Rules, basis: Sequence[str] | None, candidates: Sequence[Candidate]) -> str:
    """`rules` and the workers that made the difference, with the candidates that are told of; all workers where all did. Of the others
    nothing is needed: the best of all is the best of some, if it is among them."""
    wanted = {w.worker_id for w in cluster.workers} if basis is None else {*basis, *(c.worker.worker_id for c in candidates)}
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


def _from_inputs(inputs: Mapping[str, Any]) -> tuple[ClusterSnapshot, Rules]:
    """Raises ValueError for what `_inputs` did not make."""
    try:
        layouts, plain = inputs["layouts"], inputs["workers"]
        workers = [each | {"report": each["report"] | {"layout": layouts[each["report"]["layout"]]}} for each in plain]
        overlaps = {worker_id: RecordedOverlap(*numbers) for worker_id, numbers in inputs["overlaps"].items()}
        rules = from_plain(Rules, inputs["rules"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"these are no inputs of a decision: {error!r}") from error
    return ClusterSnapshot(workers=tuple(from_plain(WorkerView, each) for each in workers), overlaps=overlaps), rules
