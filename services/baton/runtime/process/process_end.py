"""Learns how another process of this machine has ended, although it is not a child of this one."""

import fcntl
import os
import signal
import struct
from contextlib import suppress
from pathlib import Path

_INFO_BYTES = 64
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
"""`PIDFD_GET_INFO` of linux/pidfd.h with the first version of its struct."""
_HAS_EXIT = 1 << 3
"""`PIDFD_INFO_EXIT`, since Linux 6.15: the process has been reaped, and its wait status is known."""
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals of a crash in native code."""
_VMSTAT = Path("/proc/vmstat")


class ProcessEnd:
    """Watches one process from its start to its end.

    It holds a pidfd, so a reused pid is no problem. On Linux before 6.15, and on other systems, the exit code
    of a process that is not a child stays unknown.
    """

    def __init__(self, pid: int, *, vmstat: Path = _VMSTAT) -> None:
        self.pid = pid
        self._vmstat = vmstat
        self._kernel_kills = _kernel_kills(vmstat)
        self._fd: int | None = None
        with suppress(OSError, AttributeError):
            self._fd = os.pidfd_open(pid)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, negative for a signal; None if it lives or its end is not known."""
        if self._fd is None:
            return None
        info = bytearray(_INFO_BYTES)
        struct.pack_into("Q", info, 0, _HAS_EXIT)
        try:
            fcntl.ioctl(self._fd, _GET_INFO, info)
        except OSError:
            return None
        if not struct.unpack_from("Q", info, 0)[0] & _HAS_EXIT:
            return None
        return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _INFO_BYTES - 4)[0])

    @property
    def num_kernel_kills(self) -> int:
        """Number of processes that the kernel has killed for lack of memory since this watch began."""
        return max(0, _kernel_kills(self._vmstat) - self._kernel_kills)

    def close(self) -> None:
        """Release the pidfd. Can be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def describe_exit(exit_code: int, num_kernel_kills: int = 0) -> str:
    """Describe how a process ended, such as `killed by SIGSEGV` or `exited with code 3`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    killed = _lack_of_memory(num_kernel_kills) if exit_code == -signal.SIGKILL else ""
    return f"killed by {name}{killed}"


def describe_unknown_exit(reason: str, num_kernel_kills: int, log_file: str) -> str:
    """Describe the end of a process whose exit code is unknown: the reason that is known, and its log."""
    return f"{reason}{_lack_of_memory(num_kernel_kills)}; its log: {log_file}"


def _lack_of_memory(num_kernel_kills: int) -> str:
    if not num_kernel_kills:
        return ""
    return f", and the kernel has ended {num_kernel_kills} process(es) for lack of memory (dmesg)"


def _kernel_kills(vmstat: Path) -> int:
    with suppress(OSError, ValueError):
        for line in vmstat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
