"""The measured throughput of loads that run beside each other, and what it predicts for the next one."""

from baton.engine.tiers.copy_speed import CopySpeed

_PART_WEIGHT = 0.25
"""Weight of the newest part in the moving average of their times."""


class LoadThroughput:
    """Measures loads of a tier that reads several parts at a time. The caller passes the time.

    A load takes at least as long as one part. What it waits for is the caller's to add.
    """

    def __init__(self) -> None:
        self._speed = CopySpeed()
        self._part_s: float | None = None
        self._num_loads = 0
        self._counted_until_s = 0.0

    @property
    def s_per_byte(self) -> float | None:
        """Seconds per byte while loads run; None before the first."""
        return self._speed.s_per_byte

    def forget(self) -> None:
        """Drop what was measured. Loads that run are counted when they end."""
        self._speed, self._part_s = CopySpeed(), None

    def forget_parts(self) -> None:
        """Drop what parts took, so that the next load is predicted by its bytes."""
        self._part_s = None

    def predicted_s(self, num_bytes: int) -> float | None:
        """Return the predicted time of a load without others before it; None before the first."""
        if self.s_per_byte is None:
            return None
        return max(self._part_s or 0.0, num_bytes * self.s_per_byte)

    def begin(self, now_s: float) -> None:
        """A load begins."""
        if not self._num_loads:
            self._counted_until_s = now_s
        self._num_loads += 1

    def end(self, num_read_bytes: int, now_s: float) -> None:
        """A load ends. It has read `num_read_bytes`."""
        self._num_loads -= 1
        self._speed.observe(num_read_bytes, now_s - self._counted_until_s)
        self._counted_until_s = now_s

    def observe_part(self, part_s: float) -> None:
        """A part took so long, waits included."""
        known_s = part_s if self._part_s is None else self._part_s
        self._part_s = (1 - _PART_WEIGHT) * known_s + _PART_WEIGHT * part_s
