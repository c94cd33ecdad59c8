"""Chooses ports for servers of tests, each for one test process only."""

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import BinaryIO

from baton.core.errors import ConfigError
from baton.runtime.network.addresses import choose_port

FIRST_PORT, LAST_PORT = 12_000, 31_999
"""Below the ports of outgoing connections, which could take a free port before its server does."""
MAX_TRIES = 50
_reserved: set[int] = set()


def free_port(host: str) -> int:
    """Return a random free port of this address, reserved until this process ends.

    A reservation keeps other test processes from choosing a port whose server has not started yet, or was
    killed and starts again. Raises ConfigError if no port is found.
    """
    rng = Random()  # differs between the processes of a test run
    error = ConfigError("no port could be reserved for a test; too many test processes run")
    for _ in range(MAX_TRIES):
        port = rng.randint(FIRST_PORT, LAST_PORT)
        try:
            choose_port(host, port, flag="port of a test")
            if _reserve(port):
                return port
        except ConfigError as taken:
            error = taken
    raise error


def _reserve(port: int) -> bool:
    """Lock the byte of this port in a file that all test processes share. Returns False if it is reserved."""
    if port in _reserved:  # a process can lock its own bytes again
        return False
    try:
        fcntl.lockf(_reservations(os.getpid()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved.add(port)
    return True


@cache
def _reservations(pid: int) -> BinaryIO:
    """Open the shared file, once in each process: closing any descriptor of it would end all locks."""
    return (Path(tempfile.gettempdir()) / f"baton-test-ports-{os.getuid()}").open("ab")
