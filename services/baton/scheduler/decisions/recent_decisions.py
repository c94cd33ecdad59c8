"""Keeps the recent decisions of a scheduler in bounded memory."""

import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.ids import DecisionId
from baton.core.plain_json import from_plain, to_plain
from baton.core.request import RequestActuals
from baton.runtime.process.byte_budget import Account, ByteBudget, OverBudget, Reservation
from baton.scheduler.decisions.decision_records import UnrecordedDecision
from baton.scheduler.scheduler_budget import DECISION_BYTES, packed_bytes, record_bytes, unrecorded_bytes

MAX_DECISIONS = 4_096
MAX_UNRECORDED = 256
"""Decisions kept with all their inputs until their records are built."""
MAX_UNPACKED = 256
"""Records kept as objects. Older ones are compressed, which makes them about eight times smaller."""


@dataclass(slots=True)
class _RecentDecision:
    """One remembered decision: without a record, with one, or with a compressed one."""

    request_id: bytes
    kept: UnrecordedDecision | DecisionRecord | bytes
    reservation: Reservation
    actuals: RequestActuals | None = None


class RecentDecisions:
    """The last `MAX_DECISIONS` decisions, so that recent requests are explained without the store.

    They take the account `RECORDS` of `budget`. If it is full, the oldest are forgotten.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._recent: OrderedDict[DecisionId, _RecentDecision] = OrderedDict()
        self._unrecorded: OrderedDict[DecisionId, UnrecordedDecision] = OrderedDict()
        self._unpacked: OrderedDict[DecisionId, DecisionRecord] = OrderedDict()

    def add(self, decision: UnrecordedDecision) -> None:
        """Remember a decision. Its record is built by the first `record_of` or `of_request`.

        Of more than `MAX_UNRECORDED` decisions without a record, the oldest keep only their answers.
        """
        reservation = self._budget.reserve(Account.RECORDS, 0, "a decision")
        recent = _RecentDecision(decision.query.request_id, decision, reservation)
        self._recent[decision.decision_id] = recent
        self._unrecorded[decision.decision_id] = decision
        num_workers = len(decision.cluster.workers) if decision.cluster is not None else 0
        self._resize(decision.decision_id, recent, unrecorded_bytes(decision.query, num_workers))
        if len(self._unrecorded) > MAX_UNRECORDED:
            late_id, late = self._unrecorded.popitem(last=False)
            self._recent[late_id].kept = late.without_inputs()
            self._resize(late_id, self._recent[late_id], DECISION_BYTES)
        if len(self._recent) > MAX_DECISIONS:
            self._forget(next(iter(self._recent)))

    def record_of(self, decision_id: DecisionId) -> DecisionRecord | None:
        """Return the record with its outcome so far, or None if the decision has been forgotten."""
        recent = self._recent.get(decision_id)
        if recent is None:
            return None
        kept = recent.kept
        if isinstance(kept, bytes):
            record = _unpack(kept)
        elif isinstance(kept, DecisionRecord):
            record = kept
        else:
            record = self._build(decision_id, recent, kept)
        return record if recent.actuals is None else replace(record, actuals=_as_dict(recent.actuals))

    def finish(self, actuals: RequestActuals) -> bool:
        """Add the outcome of a request. Returns False if its decision has been forgotten."""
        recent = self._recent.get(actuals.decision_id)
        if recent is not None:
            recent.actuals = actuals
        return recent is not None

    def of_request(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        """Return the records of one request by attempt.

        `request_id` None: the request that was decided last.
        """
        if request_id is None:
            if not self._recent:
                return ()
            request_id = next(reversed(self._recent.values())).request_id
        ids = [decision_id for decision_id, recent in self._recent.items() if recent.request_id == request_id]
        return tuple(sorted((r for r in map(self.record_of, ids) if r is not None), key=lambda r: r.attempt))

    def _build(self, decision_id: DecisionId, recent: _RecentDecision, decision: UnrecordedDecision) -> DecisionRecord:
        """Build the record of a decision, and compress the oldest record."""
        record = decision.to_record()
        self._unrecorded.pop(decision_id, None)
        recent.kept = self._unpacked[decision_id] = record
        self._resize(decision_id, recent, record_bytes(record))
        if len(self._unpacked) > MAX_UNPACKED:
            old_id, old = self._unpacked.popitem(last=False)
            packed = self._recent[old_id].kept = _pack(old)
            self._resize(old_id, self._recent[old_id], packed_bytes(len(packed)))
        return record

    def _resize(self, decision_id: DecisionId, recent: _RecentDecision, num_bytes: int) -> None:
        """Reserve `num_bytes` for a decision. Forgets the oldest, perhaps itself, until they fit.

        A decision that never fits is forgotten alone.
        """
        while self._recent.get(decision_id) is recent:
            try:
                return recent.reservation.resize(num_bytes)
            except OverBudget as error:
                self._forget(next(iter(self._recent)) if error.fits_later else decision_id)

    def _forget(self, decision_id: DecisionId) -> None:
        self._recent.pop(decision_id).reservation.release()
        self._unrecorded.pop(decision_id, None)
        self._unpacked.pop(decision_id, None)


def _pack(record: DecisionRecord) -> bytes:
    return zlib.compress(json.dumps(to_plain(record), separators=(",", ":")).encode(), level=1)


def _unpack(packed: bytes) -> DecisionRecord:
    return from_plain(DecisionRecord, json.loads(zlib.decompress(packed)))


def _as_dict(actuals: RequestActuals) -> dict[str, object]:
    return {
        "outcome": actuals.outcome,
        "ttft_s": actuals.ttft_s,
        "tpot_s": actuals.tpot_s,
        "num_output_tokens": actuals.num_output_tokens,
        "num_cached_tokens": actuals.num_cached_tokens,
        "legs": [{name: getattr(leg, name) for name in leg.__dataclass_fields__} for leg in actuals.legs],
    }
