"""May one process read another's memory? `python -m baton.fleet.doctor.doctor_cma owner` prints a line, `...
reader` takes it.

UCX's fastest way between processes of a host (`cma`) is the system call that this tries; Yama, seccomp and
user namespaces forbid it.
"""

import ctypes
import os
import sys

WORD = b"baton can read this"


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def own_forever() -> None:
    """Print this process's id and the word's address; end with standard input."""
    buffer = ctypes.create_string_buffer(WORD)
    sys.stdout.write(f"{os.getpid()} {ctypes.addressof(buffer)}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def read(pid: int, address: int) -> str:
    """Empty when the word could be read, else why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this system has no process_vm_readv"
    into = ctypes.create_string_buffer(len(WORD))
    here, there = _Piece(ctypes.addressof(into), len(WORD)), _Piece(address, len(WORD))
    if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != len(WORD):
        return os.strerror(ctypes.get_errno())
    return "" if into.raw == WORD else "other bytes were read"


def main() -> None:
    if sys.argv[1] == "owner":
        own_forever()
    else:
        pid, address = sys.stdin.readline().split()
        sys.stdout.write(read(int(pid), int(address)) + "\n")


if __name__ == "__main__":
    main()
