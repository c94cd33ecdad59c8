"""Reserves processes for faults, and starts processes again that ended by themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from tests.nemesis.plan import REDIS, SERVICES, WORKERS
from tests.nemesis.world import World

POLL_S = 0.5


class Keeper:
    """Lets one fault or restart at a time act on a process.

    A worker may ask to be replaced, and then ends with exit code 0. Every other end is a problem.
    """

    def __init__(self, world: World, problem: Callable[[str, str], None], say: Callable[[str], None]) -> None:
        """`problem` gets the kind and the text of each problem, `say` the progress."""
        self._world = world
        self._problem = problem
        self._say = say
        self._busy = {name: asyncio.Lock() for name in (*SERVICES, REDIS)}

    @asynccontextmanager
    async def held(self, *names: str) -> AsyncIterator[None]:
        """Wait until no one else acts on these processes, start again what has ended, and hold them."""
        async with AsyncExitStack() as stack:
            for name in sorted(names):  # in one order everywhere, so that no two wait for each other
                await stack.enter_async_context(self._busy[name])
            for name in names:
                await self._replace(name)
            yield

    async def run(self) -> None:
        """Start processes again as soon as they have ended and no fault holds them, until cancelled."""
        async with asyncio.TaskGroup() as group:  # a slow restart delays no other one
            for name in self._busy:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        while True:
            if self._exit_code(name) is not None:
                async with self.held(name):
                    pass
            await asyncio.sleep(POLL_S)

    def _exit_code(self, name: str) -> int | None:
        child = self._world.cluster.children.get(name)
        return None if child is None else child.exit_code

    async def _replace(self, name: str) -> None:
        """Start a process again if it has ended."""
        code = self._exit_code(name)
        if code is None:
            return
        if code != 0 or name not in WORKERS:
            self._problem("ended", f"{name} ended with exit code {code}; see {self._world.cluster.directory}")
        self._say(f"{name} ended with exit code {code} and is started again")
        self._world.times.open_down.setdefault(name, self._world.now_s())
        await self._world.restart(name)


def exceptions_of(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions of a group, and of the groups in it, or the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        return [each for inner in error.exceptions for each in exceptions_of(inner)]
    return [error]
