"""Decides after how many invalid pulls a link is not used any more, and when such a link is tried again."""

MAX_INVALID_PULLS = 3
"""Number of invalid pulls in a row after which a link is invalid. One is normal: blocks are reused."""
RETRY_MIN_S = 5.0
RETRY_MAX_S = 300.0
"""Shortest and longest pause before an invalid link is tried again. It doubles each time until a block was
valid."""


class ValidationRecord:
    """Counts invalid pulls over one link and decides whether the link may be used.

    failure: why the link is invalid, so that nothing may be read over it; empty if it is not
    """

    def __init__(self) -> None:
        self.failure = ""
        self._num_invalid_pulls = 0
        self._retry_s = RETRY_MIN_S
        self._next_s = 0.0

    def blocks_valid(self) -> None:
        """Record that blocks of a pull were valid."""
        self._num_invalid_pulls, self._retry_s = 0, RETRY_MIN_S

    def pull_invalid(self, field: str, now_s: float) -> bool:
        """Record a pull that has failed validation. Returns True if the link has become invalid.

        `field`: the one that was different
        """
        self._num_invalid_pulls += 1
        if self.failure or self._num_invalid_pulls < MAX_INVALID_PULLS:
            return False
        self._fail(f"{field} of {self._num_invalid_pulls} pulls in a row", now_s)
        return True

    def entries_invalid(self, field: str, now_s: float) -> None:
        """Record that a trial read has brought entries that are not the owner's: the link is invalid."""
        self._fail(f"{field} of a trial read", now_s)

    def entries_valid(self) -> None:
        """Record that a trial read has brought entries of the owner: the link may be used again."""
        self.failure, self._num_invalid_pulls = "", 0

    def may_try(self, now_s: float) -> bool:
        """Return True if the link is not invalid, or the pause since it became so is over."""
        return not self.failure or now_s >= self._next_s

    def _fail(self, failure: str, now_s: float) -> None:
        self.failure = failure
        self._next_s = now_s + self._retry_s
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)
