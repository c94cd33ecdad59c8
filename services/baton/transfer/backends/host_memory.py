"""Allocates the host memory of one worker: its KV blocks, followed by its generation table.

NIXL registers private memory by address. `local_backend` needs shared memory that peers can map. On Linux
shared memory is a memfd that peers open through `/proc/PID/fd/FD`; the kernel frees it with its last user,
even after kill -9. On other systems it is POSIX shared memory. Its name is removed by `close`, or by
multiprocessing's resource tracker if the worker is killed.
"""

import fcntl
import mmap
import os
import platform
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.core.errors import LayoutMismatch
from baton.runtime.memory.anonymous_memory import allocate_anonymous
from baton.transfer.backends.prefault import prefault_in_background
from baton.transfer.integrity.generation_table import ENTRY_BYTES

Bytes = npt.NDArray[np.uint8]
HOST = "host"
_PAGE = mmap.PAGESIZE
_HAS_MEMFD = sys.platform == "linux"
_NEVER_RESIZED = 0x2 | 0x4 | 0x1
"""F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL. A peer that maps sealed memory cannot get SIGBUS from it."""
_F_ADD_SEALS = 1033


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRegion:
    """One contiguous memory range that a transport registers.

    memory_kind: `host` or `cuda`.
    owner: what keeps the range allocated as long as this region exists; None: the caller does that.
    """

    address: int
    num_bytes: int
    memory_kind: str = HOST
    device_id: int = 0
    owner: object = field(default=None, compare=False, repr=False)


class HostMemory:
    """KV blocks and their generation table in one page-aligned segment, blocks first.

    `handle` is what another process of this host passes to `attach_shared`; it is empty for private memory.
    The memory is freed after `close`, once no array refers to it. Pages are allocated when first written, or
    by `prefault`.
    """

    def __init__(
        self, segment: mmap.mmap, *, num_blocks: int, block_bytes: int, handle: str = "", fd: int = -1, name: str = ""
    ) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.handle = handle
        self._fd = fd
        self._name = name
        self._stop_prefault: Callable[[], None] = lambda: None
        everything = np.frombuffer(segment, dtype=np.uint8)
        self._kv = everything[: num_blocks * block_bytes]
        begin = generation_table_offset(num_blocks, block_bytes)
        self._generation_table = everything[begin : begin + num_blocks * ENTRY_BYTES]

    @property
    def kv(self) -> Bytes:
        """The blocks, [num_blocks, block_bytes] uint8, as a view that is shared with all users of this
        memory."""
        return self._kv.reshape(self.num_blocks, self.block_bytes)

    @property
    def generation_table(self) -> Bytes:
        """The bytes of the generation table, [num_blocks * 32] uint8."""
        return self._generation_table

    @property
    def region(self) -> KvRegion:
        """The range of the KV blocks."""
        return KvRegion(address=self._kv.ctypes.data, num_bytes=self._kv.nbytes)

    def prefault(self) -> None:
        """Start to allocate every page in the background."""
        self._stop_prefault = prefault_in_background(self._kv.ctypes.data, self._kv.nbytes)

    def close(self) -> None:
        """Remove the name and descriptor that other processes attach by. Safe to call twice."""
        self._stop_prefault()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._name:
            _unlink(self._name)
            self._name = ""
        self._kv = self._generation_table = np.empty(0, dtype=np.uint8)
        self.num_blocks = 0


def generation_table_offset(num_blocks: int, block_bytes: int) -> int:
    """Return the offset of the generation table in a segment, in bytes."""
    return -(-num_blocks * block_bytes // _PAGE) * _PAGE


def segment_bytes(num_blocks: int, block_bytes: int) -> int:
    """Return the size of a segment in bytes: blocks and generation table, each rounded up to whole pages."""
    return generation_table_offset(num_blocks, block_bytes) + -(-num_blocks * ENTRY_BYTES // _PAGE) * _PAGE


def allocate_private(num_blocks: int, block_bytes: int) -> HostMemory:
    """Allocate memory that only this process maps. Raises OSError if there is not enough memory."""
    return HostMemory(
        allocate_anonymous(segment_bytes(num_blocks, block_bytes)), num_blocks=num_blocks, block_bytes=block_bytes
    )


def anonymous(num_bytes: int) -> mmap.mmap:
    """Allocate private, page-aligned memory, with every page allocated and zeroed."""
    segment = allocate_anonymous(num_bytes)
    np.frombuffer(segment, dtype=np.uint8).fill(0)
    return segment


def anonymous_region(num_bytes: int) -> KvRegion:
    """Return a region over `anonymous` memory, which it owns."""
    memory = np.frombuffer(anonymous(num_bytes), dtype=np.uint8)
    return KvRegion(address=int(memory.ctypes.data), num_bytes=memory.nbytes, owner=memory)


def allocate_shared(num_blocks: int, block_bytes: int, *, memfd: bool = _HAS_MEMFD) -> HostMemory:
    """Allocate memory that processes of this host can attach.

    Raises OSError if there is not enough memory.
    """
    size = segment_bytes(num_blocks, block_bytes)
    if memfd:
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _F_ADD_SEALS, _NEVER_RESIZED)
        segment = mmap.mmap(fd, size)
        handle, name = f"memfd:{host_id()}:{os.getpid()}:{fd}", ""
    else:
        named = shared_memory.SharedMemory(create=True, size=size)  # the resource tracker knows the name from here on
        fd, name = -1, named.name
        named.close()
        segment = _map_named(name, size)
        handle = f"shm:{host_id()}:0:{name}"
    return HostMemory(segment, num_blocks=num_blocks, block_bytes=block_bytes, handle=handle, fd=fd, name=name)


def attach_shared(handle: str, *, num_blocks: int, block_bytes: int) -> HostMemory:
    """Map another process's shared memory by its `handle`.

    Raises LayoutMismatch if the memory is on another host or has another size, OSError if that process is
    gone.
    """
    kind, host, pid, where = _parse(handle)
    if host != host_id():
        raise LayoutMismatch(
            "memory_kind: the peer's shared memory is on another host; start the workers with --transfer nixl, "
            "collective or auto"
        )
    size = segment_bytes(num_blocks, block_bytes)
    segment = _map_memfd(int(pid), int(where), size) if kind == "memfd" else _map_named(where, size)
    return HostMemory(segment, num_blocks=num_blocks, block_bytes=block_bytes, handle=handle)


def _parse(handle: str) -> tuple[str, str, str, str]:
    parts = handle.split(":")
    if len(parts) != 4 or parts[0] not in ("memfd", "shm") or not parts[2].isdigit() or "/" in parts[3]:
        raise LayoutMismatch(
            "memory_kind: the peer's memory is not shared memory; give both workers the same --transfer"
        )
    if parts[0] == "memfd" and not parts[3].isdigit():
        raise LayoutMismatch("memory_kind: the peer's shared memory handle has no file descriptor")
    return parts[0], parts[1], parts[2], parts[3]


def _map_memfd(pid: int, fd: int, size: int) -> mmap.mmap:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    return _map(opened, size)


def _map_named(name: str, size: int) -> mmap.mmap:
    # Not SharedMemory(name): before Python 3.13 the attaching process's resource tracker unlinks the name
    # when that process ends.
    import _posixshmem  # type: ignore[import-not-found]

    return _map(_posixshmem.shm_open(f"/{name.lstrip('/')}", os.O_RDWR, mode=0o600), size)


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        found = os.fstat(fd)
        # macOS rounds a segment up to whole pages of its own; a size that is too small would fault on access.
        if not stat.S_ISREG(found.st_mode) and sys.platform == "linux":
            raise LayoutMismatch("memory_kind: the peer's descriptor is not shared memory")
        if found.st_size < size:
            raise LayoutMismatch(
                f"num_blocks: the peer's shared memory has {found.st_size} bytes; the layout needs {size}"
            )
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _unlink(name: str) -> None:
    tracked: Any = None
    try:
        tracked = shared_memory.SharedMemory(name)
    except FileNotFoundError:
        return
    tracked.close()
    tracked.unlink()


def host_id() -> str:
    """Return an id that is equal for processes which can map each other's memory: the boot id, or the host
    name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node().replace(":", "_")
