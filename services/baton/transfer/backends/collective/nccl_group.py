"""A process group of NCCL: NVLink or the network between two GPUs. Not verified: no GPU has run it."""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from baton.transfer.backends.collective.process_group import GroupFailed
from baton.transfer.backends.collective.rendezvous_store import RendezvousClosed, RendezvousStore

_POLL_S = 0.0002


class NcclGroup:
    """Implements `ProcessGroup`.

    An operation is only queued on the GPU, so `wait` polls for its end. NCCL connects with the first message;
    the limit of `wait` covers that.
    """

    def __init__(self, store: RendezvousStore, rank: int, device: torch.device, *, timeout_s: float) -> None:
        """`timeout_s`: longest time that joining may take."""
        self._store, self._rank, self._device = store, rank, device
        self._timeout_s = timeout_s
        self._group: Any = None
        self._is_aborted = False

    def join(self) -> None:
        from torch.distributed import ProcessGroupNCCL

        try:
            torch.cuda.set_device(self._device)
            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout_s)
            self._group = ProcessGroupNCCL(self._store, self._rank, 2, options)
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
            while not work.is_completed():
                if self._is_aborted or time.monotonic() >= ends_s:
                    raise GroupFailed(
                        "the group was left" if self._is_aborted else f"no message within {timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            work.wait()
            torch.cuda.current_stream(self._device).synchronize()
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(str(error)) from error

    def abort(self) -> None:
        self._is_aborted = True
        self._store.close()

    def close(self) -> None:
        self._store.close()
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()
        self._group = None

    def _start(self, operation: Any, buffer: Tensor) -> Any:
        try:
            return operation([buffer], 1 - self._rank, 0)
        except (RuntimeError, RendezvousClosed, TimeoutError) as error:
            raise GroupFailed(str(error)) from error
