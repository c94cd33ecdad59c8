"""Learns what pulls over one link cost beyond the time of their bytes."""

from collections import deque
from statistics import median

_NUM_SAMPLES = 16
"""Pulls that an estimate covers. Their median ignores single pulls that a busy process has delayed."""


class PullCosts:
    """The fixed costs of pulls over one link, in seconds; 0 until they are measured.

    pull_s: beyond the bytes, from the request for cached blocks to the last validated one
    exposed_s: beyond the bytes, from the end of the owner's prefill to the last validated block
    dial_s: from the first attempt to connect that the owner answered to the end of the first read
    """

    __slots__ = ("_exposed", "_pulls", "dial_s")

    def __init__(self) -> None:
        self.dial_s = 0.0
        self._pulls: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._exposed: deque[float] = deque(maxlen=_NUM_SAMPLES)

    @property
    def pull_s(self) -> float:
        return median(self._pulls) if self._pulls else 0.0

    @property
    def exposed_s(self) -> float:
        return median(self._exposed) if self._exposed else 0.0

    def pulled_prefix(self, duration_s: float, bytes_s: float) -> None:
        """Record a pull of cached blocks. `bytes_s`: time that the link took for all bytes meanwhile."""
        self._pulls.append(max(0.0, duration_s - bytes_s))

    def pulled_prompt(self, exposed_s: float, bytes_s: float) -> None:
        """Record a pull of a prompt's KV. `bytes_s`: of all bytes on the link during `exposed_s`."""
        self._exposed.append(max(0.0, exposed_s - bytes_s))
