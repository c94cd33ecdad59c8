"""Samples the memory of all processes, and compares its end with minute five."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MIB = 2**20
GROWTH_BYTES = 32 * MIB
"""Allowed growth of a process's memory, and of Redis's."""
MINUTE_FIVE_S = 300.0
SAMPLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of one process."""

    pid: int
    num_bytes: int


class MemorySamples:
    """Memory by name of the process, at times in seconds since the first sample."""

    def __init__(self, read: Callable[[], Mapping[str, Memory]], now_s: Callable[[], float]) -> None:
        self._read = read
        self._now_s = now_s
        self._samples: list[tuple[float, Mapping[str, Memory]]] = []

    async def run(self) -> None:
        """Take samples until cancelled."""
        start_s = self._now_s()
        while True:
            self.add(self._now_s() - start_s, self._read())
            await asyncio.sleep(SAMPLE_S)

    def add(self, at_s: float, memory: Mapping[str, Memory]) -> None:
        """Add a sample."""
        self._samples.append((at_s, memory))

    def problems(self, names: Iterable[str], end: Mapping[str, Memory]) -> list[str]:
        """Return each process that has grown, or of which that is not known.

        A process is compared with itself at minute five of the run, or of its own if a fault restarted it. A
        process that started too late is compared with the highest memory that its predecessors had since
        minute five.
        """
        return [text for name in names if (text := self._problem(name, end.get(name)))]

    def _problem(self, name: str, now: Memory | None) -> str:
        known = [(at_s, memory[name]) for at_s, memory in self._samples if name in memory]
        late = [(at_s, memory) for at_s, memory in known if at_s >= MINUTE_FIVE_S]
        if now is None or not late:
            return f"not measured: {name} has {len(late)} samples after minute five, {now} at the end"
        own_start_s = min((at_s for at_s, memory in known if memory.pid == now.pid), default=late[-1][0])
        settled_s = own_start_s + MINUTE_FIVE_S if own_start_s > 0 else 0.0
        own = [memory.num_bytes for at_s, memory in late if memory.pid == now.pid and at_s >= settled_s]
        was = own[0] if own else max(memory.num_bytes for _, memory in late)
        return grown(name, was, now.num_bytes)


def grown(name: str, was: int, now: int) -> str:
    """Return a text if memory has grown by more than `GROWTH_BYTES`, an empty one otherwise."""
    if now <= was + GROWTH_BYTES:
        return ""
    return f"{name} has {now / MIB:.0f} MiB of memory, {was / MIB:.0f} MiB before"
