"""Chooses ports for servers of tests."""

from random import Random

from baton.core.errors import ConfigError
from baton.runtime.network.addresses import choose_port

FIRST_PORT, LAST_PORT = 12_000, 31_999
"""Below the ports of outgoing connections, which could take a free port before its server does."""
MAX_TRIES = 50


def free_port(host: str) -> int:
    """Return a random free port of this address. Raises ConfigError if none is found."""
    rng = Random()  # differs between the processes of a test run
    for _ in range(MAX_TRIES - 1):
        try:
            return choose_port(host, rng.randint(FIRST_PORT, LAST_PORT), flag="port of a test")
        except ConfigError:
            continue
    return choose_port(host, rng.randint(FIRST_PORT, LAST_PORT), flag="port of a test")
