"""Paces the copies out of one worker, so that they delay its steps by a small share of the time."""

import asyncio
from collections.abc import Callable

from baton.engine.tiers.copy_policy import pause_after_s

MAX_POSTPONED_S = 1.0
"""Most pause time that copies for preempted sequences may postpone. Steps may be delayed by
`MAX_STEP_DELAY` of it at once."""


class CopyPacing:
    """The pauses of all copies out of one worker, which its tiers share. Used from one event loop."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        """`is_busy` returns True while steps run, which copies must not delay."""
        self._is_busy = is_busy
        self._ends_s = 0.0

    def charge(self, busy_s: float) -> None:
        """Add the pause for a copy that used what steps need for `busy_s` seconds."""
        if self._is_busy():
            self._ends_s = max(self._ends_s, asyncio.get_running_loop().time()) + pause_after_s(busy_s)

    def wait_s(self, *, is_urgent: bool) -> float:
        """Return how long to wait before the next copy. One that is urgent may postpone pauses."""
        if not self._is_busy():
            return 0.0
        left_s = self._ends_s - asyncio.get_running_loop().time()
        return max(0.0, left_s - MAX_POSTPONED_S if is_urgent else left_s)
