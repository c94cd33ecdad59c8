"""The measured speed of copies to or from a tier."""

_MEMORY_BYTES = 32 * 2**20
"""Window of the moving average. After this many bytes, a copy of the same size has half of the total
weight."""


class CopySpeed:
    """Byte-weighted moving average of seconds per byte; None before the first copy."""

    def __init__(self) -> None:
        self.s_per_byte: float | None = None
        self._seen_bytes = 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Record a copy. One that is shorter than the clock's resolution is ignored."""
        if seconds <= 0 or num_bytes <= 0:
            return
        weight = num_bytes / (num_bytes + self._seen_bytes)
        self._seen_bytes = min(_MEMORY_BYTES, self._seen_bytes + num_bytes)
        self.s_per_byte = (1 - weight) * (self.s_per_byte or 0.0) + weight * seconds / num_bytes
