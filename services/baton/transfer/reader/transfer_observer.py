"""What a reader tells whoever counts: metrics come from outside, so that this package needs none."""

from typing import Protocol

from baton.core.errors import Reason
from baton.core.ids import WorkerRef


class TransferObserver(Protocol):
    """Called on the event loop; must not block or raise."""

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        """A pull has landed (reason None) or failed. `duration_s`: from its first question to the owner;
        `read_s`: while a read of it was running."""
        ...

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        """Blocks were read whole and not taken: `what` of life, hash, epoch, lease or shape did not fit."""
        ...

    def read_given_up(self, owner: WorkerRef, num_blocks: int) -> None:
        """A read passed its deadline; that many blocks of ours are quarantined."""
        ...

    def link_changed(self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool) -> None:
        """A pair was measured, broke or works again."""
        ...


class NoObserver:
    """Counts nothing."""

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        pass

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        pass

    def read_given_up(self, owner: WorkerRef, num_blocks: int) -> None:
        pass

    def link_changed(self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool) -> None:
        pass
