"""Tests marks in slot headers: those that wait are written together, for the content of the slot then."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.worker.disk.header_marks import HeaderMarks
from baton.worker.disk.os_file import NoAnswer


class Headers:
    """Records marks, and runs one write after the other when `allow` is set."""

    writes_busy_s = 0.0

    def __init__(self) -> None:
        self.sequences = {1: 10, 2: 20, 3: 30}
        self.marks: list[tuple[str, dict[int, int]]] = []
        self.allow = asyncio.Event()
        self.error: Exception | None = None

    def sequence(self, slot: int) -> int:
        return self.sequences[slot]

    def drop(self, sequences: Mapping[int, int]) -> None:
        self.marks.append(("drop", dict(sequences)))

    def announce(self, sequences: Mapping[int, int]) -> None:
        self.marks.append(("announce", dict(sequences)))

    async def write(self, job: Callable[[], Any], num_bytes: int) -> Any:
        await self.allow.wait()
        if self.error is not None:
            raise self.error
        return job()

    async def read(self, job: Callable[[], Any], num_bytes: int) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def new_marks() -> tuple[Headers, HeaderMarks, list["asyncio.Task[None]"]]:
    """Return the marks of these headers, and the tasks that they have started."""
    headers, tasks = Headers(), list["asyncio.Task[None]"]()
    start = asyncio.get_running_loop().create_task
    return headers, HeaderMarks(headers, headers, lambda work: tasks.append(start(work))), tasks


async def test_marks_that_wait_are_written_together() -> None:
    headers, marks, tasks = new_marks()
    marks.drop(())
    assert not tasks
    marks.drop((1,))
    await asyncio.sleep(0)
    marks.announce((2, 3))
    marks.drop((3,))
    headers.sequences[3] = 31  # written again meanwhile
    headers.allow.set()
    await asyncio.gather(*tasks)
    assert headers.marks == [("announce", {}), ("drop", {1: 10}), ("announce", {2: 20, 3: 30}), ("drop", {3: 30})]
    assert len(tasks) == 1


async def test_marks_after_a_failed_write_are_written() -> None:
    headers, marks, tasks = new_marks()
    headers.error = NoAnswer("stuck")
    headers.allow.set()
    marks.drop((1,))
    with pytest.raises(NoAnswer):
        await tasks[0]
    headers.error = None
    marks.drop((2,))
    await tasks[1]
    assert headers.marks == [("announce", {}), ("drop", {2: 20})]
