"""Decides whether a link is fast enough to be used, and when a link that was too slow is measured again."""

RETRY_MIN_S = 5.0
RETRY_MAX_S = 300.0
"""Shortest and longest pause before a refused link is measured again. It doubles with each refusal."""
_BYTES_PER_S = 1e9 / 8
"""Bytes per second of one gigabit per second."""


class SpeedRequirement:
    """The minimum speed of one link and the result of its last measurement.

    A link may be used if no speed is required, or if its last full measurement was fast enough. Before the
    first one it may not.
    """

    def __init__(self, min_gbps: float) -> None:
        """`min_gbps`: in gigabits per second; 0 requires nothing."""
        self.min_gbps = min_gbps
        self.refusal = ""
        self.is_met = min_gbps <= 0
        self.retry_s = RETRY_MIN_S
        self._next_s = 0.0

    @property
    def is_refused(self) -> bool:
        """True if the last measurement was too slow."""
        return bool(self.refusal)

    def reset(self) -> None:
        """Require a new measurement, because the link has broken and may be slower when it works again."""
        self.is_met = self.min_gbps <= 0

    def may_measure(self, now_s: float) -> bool:
        """Return True if the link was not refused, or the pause after its refusal is over."""
        return not self.is_refused or now_s >= self._next_s

    def judge(self, bytes_per_s: float, now_s: float) -> bool:
        """Record a measurement and return True if it is fast enough."""
        gbps = bytes_per_s / _BYTES_PER_S
        if self.min_gbps <= gbps:
            self.is_met, self.refusal, self.retry_s = True, "", RETRY_MIN_S
            return True
        if self.is_refused:
            self.retry_s = min(RETRY_MAX_S, 2 * self.retry_s)
        self.is_met = False
        self.refusal = f"measured {gbps:.3g} Gbit/s; --min-link-gbps is {self.min_gbps:g}"
        self._next_s = now_s + self.retry_s
        return False

    def postpone(self, now_s: float) -> None:
        """Wait as long as before for the next measurement, because this one has failed."""
        self._next_s = now_s + self.retry_s
