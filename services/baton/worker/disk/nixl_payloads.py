"""`NixlPayloads`: copies payloads with a storage backend of NIXL, which keeps many requests in flight.

With the backend GDS, the GPU's storage driver moves the data. Payloads still pass through the staging buffer
in host memory, where their checksums are computed. No machine with that driver was available, so it is not
verified.
"""

import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.runtime.logging import get_logger
from baton.transfer.backends.host_memory import Bytes
from baton.transfer.backends.nixl.nixl_agent import new_agent
from baton.transfer.backends.nixl.nixl_memory import HOST_SEGMENT
from baton.worker.disk.os_file import NoAnswer, OsFile, RawFile, ShortRead

log = get_logger(__name__)

_FILE = "FILE"
_POLL_S = 0.0002
"""Pause between two polls of a copy, which gives up the processor."""
_MAX_COPY_S = 30.0
"""Time after which a copy counts as stuck: more than a disk takes that tries a bad sector again and again."""


class NixlPayloads:
    """Implements `PayloadIo`. One copy at a time, of any number of payloads.

    After a copy that does not end, all further ones fail: its rows may be written at any time.
    """

    def __init__(self, file: RawFile, staging: Bytes, backend: str = "POSIX") -> None:
        """Register the file and `staging`, [num_rows, block_bytes] uint8, with a backend: POSIX or GDS.

        Raises ImportError without NIXL, OSError if NIXL cannot use the file.
        """
        if not isinstance(file, OsFile):
            raise TypeError("NIXL needs the descriptor of a file")
        self._file, self._staging, self._backends = file, staging, [backend]
        self._lock = threading.Lock()
        self._is_stuck = False
        self._name = f"kv-disk-{secrets.token_hex(4)}"
        regions = {
            HOST_SEGMENT[0]: (staging.ctypes.data, staging.nbytes, 0, ""),
            _FILE: (0, _size_of(file), file.fd, ""),
        }
        try:
            self._agent = new_agent(self._name, self._backends)
            self._registered = [
                self._agent.register_memory([region], segment, self._backends) for segment, region in regions.items()
            ]
        except ImportError:
            raise
        except Exception as error:  # NIXL's exceptions have no common base
            raise OSError(f"NIXL's {backend} cannot use the file: {type(error).__name__}: {error}") from error

    def read(self, offsets: Sequence[int], rows: Sequence[int]) -> None:
        self._copy("READ", rows, offsets)

    def write(self, rows: Sequence[int], offsets: Sequence[int]) -> None:
        self._copy("WRITE", rows, offsets)

    def check(self) -> None:
        if self._is_stuck:
            raise NoAnswer("an earlier copy of NIXL has not ended; restart the worker")

    def close(self) -> None:
        """Release the registered memory, unless a stuck copy may still use it."""
        if self._is_stuck:
            return
        with self._lock:
            for registered in self._registered:
                self._agent.deregister_memory(registered, self._backends)
            self._registered.clear()

    def _copy(self, operation: str, rows: Sequence[int], offsets: Sequence[int]) -> None:
        size, begin = self._staging.shape[1], self._staging.ctypes.data
        with self._lock:
            self.check()
            if operation == "READ" and max(offsets) + size > _size_of(self._file):
                raise ShortRead(f"the file ends before byte {max(offsets) + size}")
            agent = self._agent
            local = agent.get_xfer_descs(_ranges([begin + row * size for row in rows], size, 0), HOST_SEGMENT[0])
            remote = agent.get_xfer_descs(_ranges(offsets, size, self._file.fd), _FILE)
            try:
                handle = agent.initialize_xfer(operation, local, remote, self._name, backends=self._backends)
                try:
                    state = self._ended(agent.transfer(handle), handle)
                finally:
                    agent.release_xfer_handle(handle)
            except NoAnswer:
                raise
            except Exception as error:  # NIXL's exceptions have no common base
                raise OSError(
                    f"NIXL could not {operation} {len(rows)} blocks: {type(error).__name__}: {error}"
                ) from error
            if state != "DONE":
                raise OSError(f"NIXL could not {operation} {len(rows)} blocks: {state}")

    def _ended(self, state: str, handle: Any) -> str:
        """Wait for the end of a copy, and return its state. Raises NoAnswer if it does not end."""
        end_s = time.monotonic() + _MAX_COPY_S
        while state == "PROC":
            if time.monotonic() > end_s:
                self._is_stuck = True
                raise NoAnswer(f"a copy of NIXL has not ended within {_MAX_COPY_S:g} s")
            time.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        return state


def _ranges(begins: Sequence[int], size: int, device_id: int) -> Any:
    return np.array([(begin, size, device_id) for begin in begins], dtype=np.uint64)


def _size_of(file: OsFile) -> int:
    return os.fstat(file.fd).st_size
