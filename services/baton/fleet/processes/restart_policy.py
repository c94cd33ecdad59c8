"""The policy of restarts: when a process that has died is started again, and when it has died too often.

Pure: the caller passes the time.
"""

from collections import deque
from dataclasses import dataclass

_MAX_DOUBLINGS = 30
"""Largest exponent of the restart delay. It keeps the number small; the delay reaches its limit before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimit:
    """Limits how often a process may die, with exponential backoff.

    deaths: largest number of deaths within `window_s` seconds. A child process may fail as often in a row.
    first_wait_s: delay of the first restart. It doubles with each death, up to `max_wait_s`.
    """

    deaths: int = 5
    window_s: float = 60.0
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0

    @property
    def stable_s(self) -> float:
        """Time after a start from which the process counts as stable: the mean interval of allowed deaths."""
        return self.window_s / self.deaths

    def delay_s(self, num_failures: int) -> float:
        """Return the seconds until the restart after this many failures in a row."""
        return min(self.max_wait_s, self.first_wait_s * 2 ** min(num_failures - 1, _MAX_DOUBLINGS))


SERVICE_LIMIT = RestartLimit(max_wait_s=30.0)
"""Limit for child processes. One that keeps dying is tried again `max_wait_s` after each failure."""


class RestartBudget:
    """Counts the deaths of one worker actor against a `RestartLimit`."""

    def __init__(self, limit: RestartLimit) -> None:
        self._limit = limit
        self._deaths: deque[float] = deque()

    def wait_s(self, now_s: float) -> float | None:
        """Record a death at `now_s`. Return the seconds until the restart, or None after too many deaths."""
        while self._deaths and now_s - self._deaths[0] > self._limit.window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        if len(self._deaths) > self._limit.deaths:
            return None
        return self._limit.delay_s(len(self._deaths))


class CrashLoop:
    """Counts the failures of one process since it last served for `RestartLimit.stable_s`.

    A failure is a death or a start without success.
    """

    def __init__(self, limit: RestartLimit) -> None:
        self._limit = limit
        self._num_failures = 0
        self._since_s = 0.0

    @property
    def keeps_dying(self) -> bool:
        """True after more failures than the limit allows."""
        return self._num_failures > self._limit.deaths

    def fail(self, now_s: float) -> float:
        """Record a failure at `now_s`. Return the seconds until the restart."""
        if not self._num_failures:
            self._since_s = now_s
        self._num_failures += 1
        return self._limit.delay_s(self._num_failures)

    def duration_s(self, now_s: float) -> float:
        """Return the seconds since the first failure."""
        return now_s - self._since_s

    def end(self) -> bool:
        """Forget the failures, because the process serves. Return True if it kept dying before."""
        kept_dying, self._num_failures = self.keeps_dying, 0
        return kept_dying
