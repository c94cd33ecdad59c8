"""A process group of Gloo: TCP between two CPU processes."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor, empty, uint8
from torch.distributed import ProcessGroupGloo

from baton.transfer.backends.collective.process_group import GroupFailed, GroupLeft
from baton.transfer.backends.collective.rendezvous_store import RendezvousClosed, RendezvousStore

_TAG, _ABORT_TAG = 1, 2
_CLOSED = ("closed by peer", "reset by peer")
_ABORT_WAIT = timedelta(milliseconds=1)


def gloo_device(host: str) -> Any:
    """Open the device that all groups of this process share: one listening socket and one thread.

    host: address of this machine that other workers reach. Raises RuntimeError if it is none of its own.
    """
    return ProcessGroupGloo.create_device(hostname=host)


class GlooGroup:
    """Implements `ProcessGroup`.

    Gloo ends an operation in one way only: when a wait times out, it closes the connection, and everything in
    the group fails. `abort` therefore waits for a message that never comes.
    """

    def __init__(self, store: RendezvousStore, rank: int, device: Any, *, timeout_s: float) -> None:
        """`timeout_s`: longest time that joining may take."""
        self._store, self._rank = store, rank
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [device]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # of collective operations, which are not used
        self._options = options
        self._group: Any = None
        self._is_aborted = False

    def join(self) -> None:
        try:
            self._group = ProcessGroupGloo(self._store, self._rank, 2, self._options)
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(f"the group was not formed: {error}") from error
        if self._is_aborted:
            raise GroupFailed("the group was left while it formed")

    def start_send(self, buffer: Tensor) -> Any:
        try:
            return self._group.send([buffer], 1 - self._rank, _TAG)
        except RuntimeError as error:
            raise _failure(error) from error

    def start_receive(self, buffer: Tensor) -> Any:
        try:
            return self._group.recv([buffer], 1 - self._rank, _TAG)
        except RuntimeError as error:
            raise _failure(error) from error

    def wait(self, work: Any, timeout_s: float) -> None:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _failure(error) from error

    def abort(self) -> None:
        self._is_aborted = True
        self._store.close()
        group = self._group
        if group is not None:
            with suppress(RuntimeError):  # the time has passed, or the group had failed already
                group.recv([empty(1, dtype=uint8)], 1 - self._rank, _ABORT_TAG).wait(_ABORT_WAIT)

    def close(self) -> None:
        self._store.close()
        self._group = None


def _failure(error: RuntimeError) -> GroupFailed:
    """Return the exception for an error of Gloo, which has only its text to tell them apart."""
    text = str(error)
    return GroupLeft(text) if any(words in text for words in _CLOSED) else GroupFailed(text)
