"""Calls of a tier that run to their end, even if their caller is cancelled: a copy cannot be stopped."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.engine.tiers.tier_speed import TierSpeed

ResultT = TypeVar("ResultT")

MAX_STOP_S = 5.0
"""Longest wait of a cancelled call for its copy. Calls are cancelled only when the worker stops; a failed
device may never end its copies, and must not keep the process from ending."""
CLOCK_S = 0.001
"""Resolution of the event loop's timers."""


class RunningCalls:
    """The calls of one tier that run now. Used from one event loop."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}

    def start(self, work: Coroutine[Any, Any, ResultT]) -> "asyncio.Task[ResultT]":
        """Run `work` as a task that `ended` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(self._running.pop)
        return task

    async def to_its_end(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run `work` until it ends, even if the caller is cancelled.

        After `MAX_STOP_S` the device counts as failed, and the cancelled call ends without it.
        """
        loop = asyncio.get_running_loop()
        task = self.start(work)
        cancelled: asyncio.CancelledError | None = None
        until_s = float("inf")
        while not task.done() and loop.time() < until_s:
            try:
                await asyncio.wait((task,), timeout=None if cancelled is None else until_s - loop.time())
            except asyncio.CancelledError as error:
                if cancelled is None:
                    until_s = loop.time() + MAX_STOP_S
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return task.result()

    async def measured_load(
        self,
        load: Coroutine[Any, Any, int],
        speed: TierSpeed,
        *,
        num_blocks: int,
        within_s: float | None = None,
    ) -> int:
        """Run a load to its end and record its time. Returns how many blocks it has loaded.

        num_blocks, within_s: how many it should load, and its limit
        """
        clock, num_loaded = asyncio.get_running_loop().time, 0
        began_s = clock()
        speed.loads.begin(began_s)
        try:
            num_loaded = await self.to_its_end(load)
        finally:
            ended_s = clock()
            speed.loads.end(
                num_loaded,
                ended_s,
                num_wanted=num_blocks,
                is_cut_off=within_s is not None and num_loaded < num_blocks and ended_s - began_s >= within_s - CLOCK_S,
                copy_block_s=speed.store_s(1),
            )
        return num_loaded

    async def ended(self, within_s: float | None = None) -> bool:
        """Wait for all calls. Returns False if some still run after `within_s`."""
        if self._running:
            _, running = await asyncio.wait(self._running, timeout=within_s)
            return not running
        return True
