"""Identifiers of workers, jobs, transfers, reads and placement decisions."""

from dataclasses import dataclass
from typing import NewType, TypeAlias

TransferId = NewType("TransferId", int)
"""One pull of one request's KV: an unsigned 64-bit number that the reader draws, unique within the reader's
epoch."""

ReadId = NewType("ReadId", int)
"""One slice of a transfer as a `TransferBackend` sees it. The reader numbers its reads and never reuses a
number within one process."""

DecisionId = NewType("DecisionId", str)
"""One placement decision of a scheduler."""

NO_DECISION = DecisionId("")

REQUEST_ID_BYTES = 16
"""Length of a request id. Gateways generate ids; clients cannot choose them."""

Incarnation: TypeAlias = tuple[str, int]
"""(worker_id, worker_epoch): the dictionary key for one incarnation of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WorkerRef:
    """One incarnation of a worker.

    Each process draws `worker_epoch` at random; it is compared for equality only.
    """

    worker_id: str
    worker_epoch: int
    address: str

    @property
    def incarnation(self) -> Incarnation:
        """The key (worker_id, worker_epoch), without the address."""
        return self.worker_id, self.worker_epoch

    def is_same_incarnation(self, other: "WorkerRef") -> bool:
        """Return True if both refs name the same process. Addresses are not compared."""
        return self.worker_id == other.worker_id and self.worker_epoch == other.worker_epoch

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.worker_epoch:016x}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobId:
    """One attempt at one request. A worker that receives attempt k drops lower attempts of that request."""

    request_id: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id.hex()}/{self.attempt}"
