"""Tests whether one process may read the memory of another one (`process_vm_readv`).

UCX uses this system call as `cma`, its fastest transport between processes of one host. Yama, seccomp and
user namespaces can forbid it. `python -m baton.fleet.doctor.doctor_cma owner` prints one line that `...
doctor_cma reader` takes on standard input.
"""

import ctypes
import os
import sys

TEST_WORD = b"baton can read this"


class _IoVec(ctypes.Structure):
    """The C `struct iovec`: one range of memory."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def serve_memory() -> None:
    """Print this process's id and the address of the test word, then wait until standard input ends."""
    buffer = ctypes.create_string_buffer(TEST_WORD)
    sys.stdout.write(f"{os.getpid()} {ctypes.addressof(buffer)}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def read(pid: int, address: int) -> str:
    """Read the test word from another process. Return an empty string on success, else the reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system has no process_vm_readv"
    buffer = ctypes.create_string_buffer(len(TEST_WORD))
    local, remote = _IoVec(ctypes.addressof(buffer), len(TEST_WORD)), _IoVec(address, len(TEST_WORD))
    if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != len(TEST_WORD):
        return os.strerror(ctypes.get_errno())
    return "" if buffer.raw == TEST_WORD else "the bytes that were read differ"


def main() -> None:
    """Run as the owner or as the reader of the test word."""
    if sys.argv[1] == "owner":
        serve_memory()
    else:
        pid, address = sys.stdin.readline().split()
        sys.stdout.write(read(int(pid), int(address)) + "\n")


if __name__ == "__main__":
    main()
