"""How fast one peer's memory can be read, and how long a read of it may take (rule R1)."""

SLOW_BYTES_PER_S = 1e9
"""Below this a link is reported loudly: prefill produces KV faster than it."""

_MEMORY_BYTES = 32 * 2**20
"""Once so much was read, a sample of this many bytes counts as much as everything before it; earlier, a
smaller one does."""
_SLACK = 4.0
"""How many times slower than measured a read may be before it is given up."""


class Bandwidth:
    """A byte-weighted moving average over ended reads. Reads of one link are served one after the other, so a
    read's time is what passed since it was started or since the one before it ended, whichever is later."""

    __slots__ = ("_last_end_s", "_seen_bytes", "bytes_per_s", "deadline_max_s", "deadline_min_s")

    def __init__(self, *, deadline_min_s: float, deadline_max_s: float) -> None:
        self.bytes_per_s: float | None = None
        self.deadline_min_s, self.deadline_max_s = deadline_min_s, deadline_max_s
        self._last_end_s = float("-inf")
        self._seen_bytes = 0

    def ended(self, num_bytes: int, started_s: float, now_s: float) -> None:
        """A read has brought `num_bytes`."""
        took_s = now_s - max(started_s, self._last_end_s)
        self._last_end_s = now_s
        if took_s <= 0 or num_bytes <= 0:
            return  # below the clock's resolution: tells nothing
        sample = num_bytes / took_s
        weight = num_bytes / (num_bytes + self._seen_bytes)
        self._seen_bytes = min(_MEMORY_BYTES, self._seen_bytes + num_bytes)
        if self.bytes_per_s is None:
            self.bytes_per_s = sample
            return
        # Seconds are averaged, not rates: what matters is how long the next read takes.
        self.bytes_per_s = 1 / ((1 - weight) / self.bytes_per_s + weight / sample)

    def deadline_s(self, num_bytes: int) -> float:
        """How long a read may take that has `num_bytes` before it on the link, its own included."""
        if self.bytes_per_s is None:
            return self.deadline_max_s
        return min(self.deadline_max_s, self.deadline_min_s + _SLACK * num_bytes / self.bytes_per_s)
