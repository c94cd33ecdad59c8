"""Samples the memory of all processes, and compares its end with minute five."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

MIB = 2**20
GROWTH_BYTES = 32 * MIB
"""Allowed growth of a process's memory, and of Redis's."""
MINUTE_FIVE_S = 300.0
SAMPLE_S = 15.0


class MemorySamples:
    """Memory in bytes by process, at times in seconds since the first sample."""

    def __init__(self, read: Callable[[], Mapping[str, int]], now_s: Callable[[], float]) -> None:
        self._read = read
        self._now_s = now_s
        self._samples: list[tuple[float, Mapping[str, int]]] = []

    async def run(self) -> None:
        """Take samples until cancelled."""
        start_s = self._now_s()
        while True:
            self.add(self._now_s() - start_s, self._read())
            await asyncio.sleep(SAMPLE_S)

    def add(self, at_s: float, memory: Mapping[str, int]) -> None:
        """Add a sample."""
        self._samples.append((at_s, memory))

    def problems(self, names: Iterable[str], end: Mapping[str, int]) -> list[str]:
        """Return each process that has grown since minute five, or of which that is not known.

        A process that was down at minute five counts from its next sample on.
        """
        return [text for name in names if (text := self._problem(name, end.get(name)))]

    def _problem(self, name: str, now: int | None) -> str:
        late = [memory[name] for at_s, memory in self._samples if at_s >= MINUTE_FIVE_S and name in memory]
        if now is None or not late:
            return f"not measured: {name} has {len(late)} samples after minute five, {now} bytes at the end"
        return grown(name, late[0], now)


def grown(name: str, was: int, now: int) -> str:
    """Return a text if memory has grown by more than `GROWTH_BYTES`, an empty one otherwise."""
    if now <= was + GROWTH_BYTES:
        return ""
    return f"{name} has {now / MIB:.0f} MiB of memory, {was / MIB:.0f} MiB before"
