"""Measures the bandwidth of one link and derives read deadlines from it."""

SLOW_BYTES_PER_S = 1e9
"""A slower link is logged as a warning, because prefill produces KV faster than it transfers."""

_MEMORY_BYTES = 32 * 2**20
"""Window of the moving average. After this many bytes, a sample of the same size has half of the total
weight."""
_SLACK = 4.0
"""Factor by which a read may be slower than measured before its deadline passes."""


class Bandwidth:
    """Byte-weighted moving average over finished reads of one link, in bytes per second; None before the
    first.

    A link serves its reads one after the other. The duration of a read counts from its start or from the end
    of the read before it, whichever is later.

    total_bytes: bytes of all finished reads
    """

    __slots__ = ("_last_end_s", "_seen_bytes", "bytes_per_s", "deadline_max_s", "deadline_min_s", "total_bytes")

    def __init__(self, *, deadline_min_s: float, deadline_max_s: float) -> None:
        self.bytes_per_s: float | None = None
        self.total_bytes = 0
        self.deadline_min_s, self.deadline_max_s = deadline_min_s, deadline_max_s
        self._last_end_s = float("-inf")
        self._seen_bytes = 0

    def ended(self, num_bytes: int, started_s: float, now_s: float) -> None:
        """Record a finished read of `num_bytes`."""
        duration_s = now_s - max(started_s, self._last_end_s)
        self._last_end_s = now_s
        self.total_bytes += num_bytes
        if duration_s <= 0 or num_bytes <= 0:
            return  # shorter than the clock's resolution
        sample = num_bytes / duration_s
        weight = num_bytes / (num_bytes + self._seen_bytes)
        self._seen_bytes = min(_MEMORY_BYTES, self._seen_bytes + num_bytes)
        if self.bytes_per_s is None:
            self.bytes_per_s = sample
            return
        # Seconds per byte are averaged, not rates, because the estimate predicts how long the next read
        # takes.
        self.bytes_per_s = 1 / ((1 - weight) / self.bytes_per_s + weight / sample)

    def restart(self) -> None:
        """Forget the average, because the next reads measure the link anew. `total_bytes` stays."""
        self.bytes_per_s, self._seen_bytes = None, 0

    def bytes_s(self, num_bytes: int) -> float:
        """Return how long reading `num_bytes` takes; 0 before the first measurement."""
        return num_bytes / self.bytes_per_s if self.bytes_per_s is not None else 0.0

    def deadline_s(self, num_bytes: int) -> float:
        """Return how long a read may take.

        `num_bytes`: all bytes in flight on the link, including this read.
        """
        if self.bytes_per_s is None:
            return self.deadline_max_s
        return min(self.deadline_max_s, self.deadline_min_s + _SLACK * num_bytes / self.bytes_per_s)
