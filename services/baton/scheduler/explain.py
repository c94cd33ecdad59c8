"""Decision records: what was decided, from what, and what came of it."""

from collections import Counter, OrderedDict
from dataclasses import replace

from baton.core.cluster import Candidate, DecisionRecord, Placement, PlacementQuery, Rejection
from baton.core.ids import DecisionId
from baton.core.request import RequestActuals

MAX_CANDIDATES = 8
MAX_RECORDS = 4_096


def record_of(
    decision_id: DecisionId,
    scheduler_id: str,
    policy: str,
    query: PlacementQuery,
    answer: Placement | Rejection,
    candidates: tuple[Candidate, ...],
) -> DecisionRecord:
    """At most `MAX_CANDIDATES` candidates that could have been chosen, the policy's order kept, and counts of why the others could not.
    The query's block hashes stay behind: a record must be small."""
    placed = answer if isinstance(answer, Placement) else None
    chosen = {w.worker_id for w in (placed.prefill, placed.decode) if w is not None} if placed else set()
    able = sorted((c for c in candidates if not c.excluded), key=lambda c: c.worker.worker_id not in chosen)
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
        num_excluded=dict(Counter(c.excluded for c in candidates if c.excluded)),
    )


class RecentDecisions:
    """The last `MAX_RECORDS` records of this scheduler, so that explaining a fresh request needs no store."""

    def __init__(self) -> None:
        self._records: OrderedDict[DecisionId, DecisionRecord] = OrderedDict()

    def put(self, record: DecisionRecord) -> None:
        self._records[record.decision_id] = record
        self._records.move_to_end(record.decision_id)
        while len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def finish(self, actuals: RequestActuals) -> DecisionRecord | None:
        """The record with what really happened, or None if it has been forgotten."""
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
        found = [r for r in self._records.values() if r.request_id == request_id]
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
