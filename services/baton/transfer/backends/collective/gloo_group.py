"""A process group of Gloo: TCP between two CPU processes."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor, empty, uint8
from torch.distributed import ProcessGroupGloo

from baton.transfer.backends.collective.group_secrets import exchange_secrets, verify_peer
from baton.transfer.backends.collective.process_group import GroupFailed, GroupLeft
from baton.transfer.backends.collective.rendezvous_store import RendezvousClosed, RendezvousStore

_TAG, _ABORT_TAG = 1, 2
_CLOSED = ("closed by peer", "reset by peer")
_ABORT_WAIT = timedelta(milliseconds=1)
_CONNECT_FACTOR = 5
"""Gloo waits so many times its timeout for a connection (`Pair::waitUntil` in its `pair.h`)."""


def gloo_device(host: str) -> Any:
    """Open a device for one group: a listening socket and a thread.

    host: address of this machine that other workers reach. Raises RuntimeError if it is none of its own.

    A device of several groups would keep what was left of a group that did not form. Connections that came
    too late would stay open, and one that comes after Gloo's timeout ends the process with a segmentation
    fault. Only with `lazy_init` does Gloo stop the device's thread before it frees what that thread uses.
    """
    return ProcessGroupGloo.create_device(hostname=host, lazy_init=True)


class GlooGroup:
    """Implements `ProcessGroup`.

    Gloo ends an operation in one way only: when a wait times out, it closes the connection, and everything in
    the group fails. `abort` therefore waits for a message that never comes. While Gloo connects, nothing ends
    it but its timeout.
    """

    def __init__(self, store: RendezvousStore, rank: int, host: str) -> None:
        """`host`: as for `gloo_device`."""
        self._store, self._rank, self._host = store, rank, host
        self._group: Any = None
        self._is_connected = False
        self._is_aborted = False

    def join(self) -> None:
        try:
            known = exchange_secrets(self._store, self._rank)
            self._group = ProcessGroupGloo(self._store, self._rank, 2, self._options())
            verify_peer(self, self._rank, known, lambda: self._store.left_s, "cpu")
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(f"the group was not formed: {error}") from error
        if self._is_aborted:
            raise GroupFailed("the group was left while it formed")

    def start_send(self, buffer: Tensor) -> Any:
        return self._start(self._group.send, buffer)

    def start_receive(self, buffer: Tensor) -> Any:
        return self._start(self._group.recv, buffer)

    def wait(self, work: Any, timeout_s: float) -> None:
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _failure(error) from error

    def abort(self) -> None:
        self._is_aborted = True
        self._store.close()
        group = self._group
        if group is not None and self._is_connected:
            with suppress(RuntimeError):  # the time has passed, or the group had failed already
                group.recv([empty(1, dtype=uint8)], 1 - self._rank, _ABORT_TAG).wait(_ABORT_WAIT)

    def close(self) -> None:
        self._store.close()
        self._group = None

    def _options(self) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo_device(self._host)]
        options._timeout = timedelta(seconds=self._store.connect_s / _CONNECT_FACTOR)
        options._threads = 1  # of collective operations, which are not used
        return options

    def _start(self, operation: Any, buffer: Tensor) -> Any:
        """Start an operation. The first one of a group connects."""
        try:
            work = operation([buffer], 1 - self._rank, _TAG)
        except RuntimeError as error:
            raise _failure(error) from error
        self._is_connected = True
        if self._is_aborted:  # `abort` may not have seen that the group is connected
            raise GroupFailed("the group was left")
        return work


def _failure(error: RuntimeError) -> GroupFailed:
    """Return the exception for an error of Gloo, which has only its text to tell them apart."""
    text = str(error)
    return GroupLeft(text) if any(words in text for words in _CLOSED) else GroupFailed(text)
