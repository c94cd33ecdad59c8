"""Names of things that outlive one function: workers and their lives, jobs and their attempts, transfers and
reads."""

from dataclasses import dataclass
from typing import NewType

TransferId = NewType("TransferId", int)
"""One pull of one request's KV, drawn by the reader: unsigned 64 bit, unique for the reader's epoch."""

ReadId = NewType("ReadId", int)
"""One slice of a transfer as a `TransferBackend` sees it, drawn by the reader, never used twice in one
process."""

DecisionId = NewType("DecisionId", str)
NO_DECISION = DecisionId("")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class WorkerRef:
    """One life of one worker. `worker_epoch` is drawn at random inside the process and compared for equality
    only."""

    worker_id: str
    worker_epoch: int
    address: str

    def is_same_life(self, other: "WorkerRef") -> bool:
        """Whether both name the same process; the address may be spelled differently."""
        return self.worker_id == other.worker_id and self.worker_epoch == other.worker_epoch

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.worker_epoch:016x}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobId:
    """One attempt at one request. A worker that receives attempt k drops lower ones."""

    request_id: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id.hex()}/{self.attempt}"
