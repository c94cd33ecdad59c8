"""The memory budget of a scheduler, and the memory that its queries, placements and records may take."""

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import PlacementQuery
from baton.runtime.process.byte_budget import Account, ByteBudget, shares

BUDGET_WEIGHTS = {
    Account.QUERIES: 2,
    Account.WAITING: 2,
    Account.PLACEMENTS: 1,
    Account.RECORDS: 2,
    Account.STREAMS: 1,
}
"""Shares of the memory budget."""
QUERY_BYTES = 2048
"""A query without its block hashes: the message, its fields, and the task that answers it."""
HASH_BYTES = 64
"""A block hash as an object, with its place in a tuple."""
PLACEMENT_BYTES = 2048
"""A placement with its reservations and its TPOT SLO at its workers."""
UNRECORDED_BYTES = 13_056
"""A decision without a record, and without its query: its answer, choice, outcome, and arrays, its place in
the client's session, and why blocks of its prompt are missing."""
UNRECORDED_WORKER_BYTES = 768
"""A worker in the snapshot and in the candidates of a decision without a record. Its report is shared."""
DECISION_BYTES = 3584
"""A decision without inputs: its answer, its outcome, its place in the client's session, why blocks of its
prompt are missing, and its places in the lists of recent decisions."""
CANDIDATE_BYTES = 1024
"""A recorded candidate with its terms."""
PACKED_BYTES = 2560
"""A decision with a compressed record, without that: its outcome and its place in the list."""


def scheduler_budget(memory_budget: int) -> ByteBudget:
    """Return the budget of a scheduler that may hold `memory_budget` bytes."""
    return ByteBudget(shares(memory_budget, BUDGET_WEIGHTS), "scheduler")


def query_bytes(query: PlacementQuery) -> int:
    """Return the memory of a placement query."""
    return QUERY_BYTES + HASH_BYTES * len(query.block_hashes)


def unrecorded_bytes(query: PlacementQuery, num_workers: int) -> int:
    """Return the memory of a decision whose record is not built, with its snapshot of `num_workers`."""
    return UNRECORDED_BYTES + query_bytes(query) + UNRECORDED_WORKER_BYTES * num_workers


def record_bytes(record: DecisionRecord) -> int:
    """Return the memory of a recent decision with its record."""
    return DECISION_BYTES + CANDIDATE_BYTES * len(record.candidates) + len(record.inputs)


def packed_bytes(num_compressed: int) -> int:
    """Return the memory of a recent decision whose record is compressed to `num_compressed` bytes."""
    return PACKED_BYTES + num_compressed
