"""Calls a function at the end of each pull, because a pull can fill blocks without an engine step after
it."""

from collections.abc import Callable

from baton.core.errors import Reason
from baton.core.ids import WorkerRef
from baton.transfer.reader.transfer_observer import TransferObserver


class PullEndObserver:
    """Implements `TransferObserver`: forwards all calls to `inner`, and calls `on_end` after `pull_ended`."""

    def __init__(self, inner: TransferObserver, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._inner = inner
        self.validation_failed = inner.validation_failed
        self.blocks_quarantined = inner.blocks_quarantined
        self.link_changed = inner.link_changed
        self.backends_measured = inner.backends_measured

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        self._inner.pull_ended(
            owner, reason=reason, transfer_bytes=transfer_bytes, duration_s=duration_s, read_s=read_s
        )
        self._on_end()
