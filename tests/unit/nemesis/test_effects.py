"""A fault that does nothing raises NoEffect, and is undone."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from redis.exceptions import OutOfMemoryError

from tests.nemesis import effect
from tests.nemesis.effect import NoEffect
from tests.nemesis.faults import FAULTS
from tests.nemesis.faults.log_disk import fill
from tests.nemesis.plan import Fault
from tests.nemesis.world import Times, World


def fault(kind: str, *targets: str) -> Fault:
    return Fault(kind=kind, targets=targets, begin_s=0.0, duration_s=0.0)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An effect is seen at once or never."""
    monkeypatch.setattr(effect, "LIMIT_S", 0.0)


async def inject(kind: str, world: Any, *targets: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    async with FAULTS[kind](world, fault(kind, *targets)):
        meanwhile()


class FakeClocks:
    logs_are_mounted = False

    def __init__(self, num_reads: int) -> None:
        self.num_reads = num_reads
        self.steps: list[float] = []

    def step_clock(self, name: str, step_s: float) -> None:
        self.steps.append(step_s)

    def num_stepped_reads(self, name: str) -> int:
        return self.num_reads


async def test_clock_that_no_one_reads_has_no_effect() -> None:
    read, unread = FakeClocks(1), FakeClocks(0)
    await inject("clock", SimpleNamespace(tools=read), "p0")
    with pytest.raises(NoEffect, match="p0 reads a clock that is off by"):
        await inject("clock", SimpleNamespace(tools=unread), "p0")
    assert read.steps[-1] == unread.steps[-1] == 0.0


class FakeLinks:
    """`passing`: answers of the probes in order. The last one is repeated."""

    def __init__(self, *passing: bool) -> None:
        self.passing = list(passing)
        self.is_cut = False

    async def passes(self, a: str, b: str, within_s: float) -> bool:
        return self.passing.pop(0) if len(self.passing) > 1 else self.passing[0]

    def cut(self, a: str, b: str) -> None:
        self.is_cut = True

    def heal(self, a: str, b: str) -> None:
        self.is_cut = False


async def test_link_that_delivers_during_a_cut_or_not_before_it_has_no_effect() -> None:
    await inject("cut_control", SimpleNamespace(network=FakeLinks(True, False)), "p0", "gateway")
    open_link = FakeLinks(True)
    with pytest.raises(NoEffect, match="passed between p0 and gateway during the cut"):
        await inject("cut_control", SimpleNamespace(network=open_link), "p0", "gateway")
    assert not open_link.is_cut
    with pytest.raises(NoEffect, match="before the cut"):
        await inject("cut_data", SimpleNamespace(network=FakeLinks(False)), "p0", "d0")


class FakeRedis:
    """Refuses writes while `maxmemory` is set, if `is_limited`. `sizes`: results of DBSIZE around a flush."""

    def __init__(self, *, is_limited: bool = True, sizes: tuple[int, int] = (3, 0)) -> None:
        self.is_limited = is_limited
        self.sizes = sizes
        self.maxmemory: Any = "100"

    @asynccontextmanager
    async def redis(self) -> AsyncIterator["FakeRedis"]:
        yield self

    async def config_get(self, name: str) -> dict[str, Any]:
        return {name: self.maxmemory}

    async def config_set(self, name: str, value: Any) -> None:
        self.maxmemory = value

    async def set(self, key: str, value: str, px: int) -> None:
        if self.is_limited and self.maxmemory == 1:
            raise OutOfMemoryError

    @asynccontextmanager
    async def pipeline(self, *, transaction: bool) -> AsyncIterator["FakeRedis"]:
        assert transaction
        yield self

    def dbsize(self) -> "FakeRedis":
        return self

    flushall = dbsize

    async def execute(self) -> list[Any]:
        return [self.sizes[0], True, self.sizes[1]]


async def test_redis_that_is_not_full_or_not_flushed_has_no_effect() -> None:
    await inject("redis_full", FakeRedis(), "redis")
    unlimited = FakeRedis(is_limited=False)
    with pytest.raises(NoEffect, match="accepts a write"):
        await inject("redis_full", unlimited, "redis")
    assert unlimited.maxmemory == "100"
    await inject("redis_flush", FakeRedis(), "redis")
    with pytest.raises(NoEffect, match="a flush of Redis removes keys"):
        await inject("redis_flush", FakeRedis(sizes=(0, 0)), "redis")


class OneProcess:
    """A cluster of one process, which sleeps."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.children = {"p0": self}
        self.signals: list[int] = []
        self.is_deaf = False

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    def pid(self, name: str) -> int:
        return self.process.pid

    def signal(self, name: str, number: int) -> None:
        if not self.is_deaf:
            self.process.send_signal(number)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self, name: str) -> None:
        self.process.send_signal(signal.SIGTERM if self.is_deaf else signal.SIGKILL)
        await self.process.wait()

    async def start_again(self, name: str) -> None:
        """Stay dead."""


@asynccontextmanager
async def one_process() -> AsyncIterator[tuple[World, OneProcess]]:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    cluster = OneProcess(process)
    try:
        world = World(cluster, None, None)  # type: ignore[arg-type]
        world.note_addresses = lambda: None  # type: ignore[method-assign]
        yield world, cluster
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_pause_of_a_process_that_goes_on_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_process() as (world, cluster):
        monkeypatch.setattr(effect, "LIMIT_S", 30.0)  # SIGSTOP takes a moment
        await inject("pause", world, "p0")
        with pytest.raises(NoEffect, match="ran again before its pause was over"):
            await inject("pause", world, "p0", meanwhile=lambda: _resumed(cluster))
        monkeypatch.setattr(effect, "LIMIT_S", 0.0)
        cluster.is_deaf = True
        with pytest.raises(NoEffect, match="p0 is stopped"):
            await inject("pause", world, "p0")
    assert len(world.times.paused) == 3


def _resumed(cluster: OneProcess) -> None:
    """Continue the process, and wait until it runs."""
    cluster.resume()
    while psutil.Process(cluster.pid("p0")).status() == psutil.STATUS_STOPPED:
        pass


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_kill_of_a_process_that_ended_otherwise_has_no_effect(is_deaf: bool) -> None:
    async with one_process() as (world, cluster):
        cluster.is_deaf = is_deaf
        if is_deaf:
            with pytest.raises(NoEffect, match="p0 ended with exit code -15, not by SIGKILL"):
                await inject("kill", world, "p0")
        else:
            await inject("kill", world, "p0")
    assert [interval.name for interval in world.times.down] == ["p0"]


class TwoProcesses:
    """A cluster of p0 and d0. `delay_s`: time before the second one can be killed."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.times = Times()
        self.events: list[str] = []

    async def kill(self, name: str) -> None:
        self.events.append(f"kill {name}")
        self.times.open_down[name] = self.delay_s if name == "d0" else 0.0

    async def restart(self, name: str) -> None:
        self.events.append(f"restart {name}")


async def test_lost_node_kills_both_workers_at_once_and_starts_both_again() -> None:
    node = TwoProcesses()
    await inject("lost_node", node, "p0", "d0", meanwhile=lambda: node.events.append("lost"))
    assert node.events == ["kill p0", "kill d0", "lost", "restart p0", "restart d0"]
    slow = TwoProcesses(delay_s=5.0)
    with pytest.raises(NoEffect, match=r"were killed 5\.0 s apart"):
        await inject("lost_node", slow, "p0", "d0")
    assert slow.events[-2:] == ["restart p0", "restart d0"]
    with pytest.raises(NoEffect, match="has no decode worker"):
        await inject("lost_node", TwoProcesses(), "p0")


async def test_log_that_grows_on_a_full_disk_has_no_effect(tmp_path: Path) -> None:
    async with one_process() as (world, _):
        log = tmp_path / "p0.log"
        log.write_text("one\n")
        world.tools = SimpleNamespace(logs_are_mounted=False, log_dir=lambda _: tmp_path)  # type: ignore[assignment]
        await inject("log_disk", world, "p0")
        with pytest.raises(NoEffect, match="has grown from 4 to 8 bytes"):
            await inject("log_disk", world, "p0", meanwhile=lambda: log.write_text("one\ntwo\n"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_log_disk_with_space_left_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "filler").symlink_to("/dev/full")  # the filler finds no space, and another file does
    with pytest.raises(NoEffect, match="is not full"):
        fill(tmp_path / "filler")
    (tmp_path / "filler").unlink()
    assert list(tmp_path.iterdir()) == []
