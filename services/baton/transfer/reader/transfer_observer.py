"""The interface through which a reader reports events, so that this package does not depend on metrics."""

from collections.abc import Mapping
from typing import Protocol

from baton.core.errors import Reason
from baton.core.ids import WorkerRef


class TransferObserver(Protocol):
    """Receives events of a reader. Called on the event loop; methods must not block or raise."""

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        """Record a pull that succeeded (`reason` is None) or failed.

        duration_s: from the first Follow to the end; read_s: total time in which at least one read was
        running
        """
        ...

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        """Record blocks that were read and then discarded.

        `what`: generation, hash, epoch, lease or shape.
        """
        ...

    def blocks_quarantined(self, owner: WorkerRef, num_blocks: int) -> None:
        """Record that `num_blocks` own blocks are quarantined: their read timed out or is in doubt."""
        ...

    def link_changed(
        self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool, refused: bool
    ) -> None:
        """Record that a link was measured, broke or works again.

        refused: it is slower than what is required, and so counts as broken, too
        """
        ...

    def backends_measured(self, owner: WorkerRef, bytes_per_s: Mapping[str, float]) -> None:
        """Record the speed of each backend of a pair when one was chosen; 0 for one that cannot be used."""
        ...


class NoObserver:
    """A `TransferObserver` that ignores all events."""

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        pass

    def validation_failed(self, owner: WorkerRef, what: str) -> None:
        pass

    def blocks_quarantined(self, owner: WorkerRef, num_blocks: int) -> None:
        pass

    def link_changed(
        self, owner: WorkerRef, *, transport: str, bytes_per_s: float, broken: bool, refused: bool
    ) -> None:
        pass

    def backends_measured(self, owner: WorkerRef, bytes_per_s: Mapping[str, float]) -> None:
        pass
