"""A process group of NCCL: NVLink or the network between two GPUs. Not verified: no GPU has run it."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from baton.transfer.backends.collective.group_secrets import exchange_secrets, verify_peer
from baton.transfer.backends.collective.process_group import GroupFailed
from baton.transfer.backends.collective.rendezvous_store import RendezvousClosed, RendezvousStore

_POLL_S = 0.0002
_OPERATION = timedelta(days=1)
"""NCCL's own limit of an operation. It is never reached: `wait` has one that ends only the group."""
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
}
"""Keeps torch from ending the whole process when an operation of one group fails or takes long. The last one
is how many seconds it waits for a communicator."""


class NcclGroup:
    """Implements `ProcessGroup`.

    An operation is only queued on the GPU, so `wait` polls for its end. The communicator is formed by `join`,
    with the exchange of secrets, because NCCL connects with the first message only.
    """

    def __init__(self, store: RendezvousStore, rank: int, device: torch.device) -> None:
        self._store, self._rank, self._device = store, rank, device
        self._group: Any = None
        self._stream: Any = None
        self._is_aborted = False

    def join(self) -> None:
        from torch.distributed import ProcessGroupNCCL

        os.environ.update(_ENVIRONMENT)
        try:
            known = exchange_secrets(self._store, self._rank)
            torch.cuda.set_device(self._device)
            options = ProcessGroupNCCL.Options()
            options._timeout = _OPERATION
            options.config.blocking = 0  # so that `abort` ends an operation that waits for the other process
            self._stream = torch.cuda.Stream(self._device)
            self._group = ProcessGroupNCCL(self._store, self._rank, 2, options)
            verify_peer(self, self._rank, known, lambda: self._store.left_s, self._device)
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(f"the group was not formed: {error}") from error
        if self._is_aborted:
            raise GroupFailed("the group was left while it formed")

    def start_send(self, buffer: Tensor) -> Any:
        return self._start(self._group.send, buffer)

    def start_receive(self, buffer: Tensor) -> Any:
        return self._start(self._group.recv, buffer)

    def wait(self, work: Any, timeout_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        try:
            self._poll(work.is_completed, ends_s)
            with torch.cuda.stream(self._stream):
                work.wait()
            self._poll(self._stream.query, ends_s)  # an operation that has failed may never leave the stream
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(str(error)) from error

    def _poll(self, has_ended: Callable[[], bool], ends_s: float) -> None:
        while not has_ended():
            if self._is_aborted:
                raise GroupFailed("the group was left")
            if time.monotonic() >= ends_s:
                raise GroupFailed("no message within the time limit")
            time.sleep(_POLL_S)

    def abort(self) -> None:
        self._is_aborted = True
        self._store.close()
        self._end()

    def close(self) -> None:
        self._store.close()
        self._end()
        self._group = None

    def _start(self, operation: Any, buffer: Tensor) -> Any:
        try:
            with torch.cuda.stream(self._stream):
                return operation([buffer], 1 - self._rank, 0)
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(str(error)) from error

    def _end(self) -> None:
        group = self._group
        if group is not None:
            with suppress(RuntimeError):
                group.abort()
