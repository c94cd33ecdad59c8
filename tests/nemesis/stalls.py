"""Measures when the event loop of the clients, or the whole machine, did not run."""

import asyncio
from collections.abc import Callable

from tests.nemesis.history import Interval

TICK_S = 0.05
LEAST_S = 0.05
"""A timer that is late by less is no stall."""


class StallMonitor:
    """Records how late its own timers fire.

    The clients share its event loop, and the cluster its machine. So a record of a client that ends late in a
    stall says nothing about the cluster.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s`: the clock of the records of requests."""
        self._now_s = now_s
        self.stalls: list[Interval] = []

    async def run(self) -> None:
        """Record stalls until cancelled."""
        while True:
            due_s = self._now_s() + TICK_S
            await asyncio.sleep(TICK_S)
            self.add(due_s, self._now_s())

    def add(self, due_s: float, fired_s: float) -> None:
        """Record the time of a timer, if it is a stall."""
        if fired_s - due_s >= LEAST_S:
            self.stalls.append(Interval(name="machine", begin_s=due_s, end_s=fired_s))
