"""Says when a pull has ended: blocks may have landed though no step follows."""

from collections.abc import Callable

from baton.core.errors import Reason
from baton.core.ids import WorkerRef
from baton.transfer.reader.transfer_observer import TransferObserver


class PullWatch:
    """A `TransferObserver` in front of another one."""

    def __init__(self, inner: TransferObserver, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._inner = inner
        self.validation_failed = inner.validation_failed
        self.read_given_up = inner.read_given_up
        self.link_changed = inner.link_changed

    def pull_ended(
        self, owner: WorkerRef, *, reason: Reason | None, transfer_bytes: int, duration_s: float, read_s: float
    ) -> None:
        self._inner.pull_ended(
            owner, reason=reason, transfer_bytes=transfer_bytes, duration_s=duration_s, read_s=read_s
        )
        self._on_end()
