"""Processes that end by themselves are started again, one actor at a time, and no error is lost."""

import asyncio
from typing import Any

import pytest

from baton.fleet.processes.supervisor import ServiceFailed
from tests.nemesis import keeper as keeper_module
from tests.nemesis.keeper import Keeper, exceptions_of
from tests.nemesis.world import Times


class FakeChild:
    def __init__(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code


class FakeWorld:
    """Restarts take one turn of the loop, or fail with `failure`."""

    def __init__(self, **exit_codes: int | None) -> None:
        self.cluster: Any = self
        self.directory = "/files"
        self.children = {name: FakeChild(code) for name, code in exit_codes.items()}
        self.times = Times()
        self.restarts: list[str] = []
        self.num_restarting = 0
        self.failure: Exception | None = None

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def restart(self, name: str) -> None:
        self.restarts.append(name)
        self.num_restarting += 1
        assert self.num_restarting == 1, "two restarts of one process"
        await asyncio.sleep(0)
        self.num_restarting -= 1
        if self.failure is not None:
            raise self.failure
        self.children[name] = FakeChild()


def kept(world: FakeWorld) -> tuple[Keeper, list[str]]:
    problems: list[str] = []
    keeper = Keeper(world, lambda kind, text: problems.append(f"{kind}: {text}"), lambda _: None)  # type: ignore[arg-type]
    return keeper, problems


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "POLL_S", 0.0)


async def until_restarted(world: FakeWorld) -> None:
    async with asyncio.timeout(60):
        while not world.restarts or world.num_restarting:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize(("name", "code", "is_problem"), [("p0", 0, False), ("p0", -11, True), ("gateway", 0, True)])
async def test_process_that_ended_is_started_again(name: str, code: int, is_problem: bool) -> None:
    world = FakeWorld(**{name: code})
    keeper, problems = kept(world)
    running = asyncio.create_task(keeper.run())
    await until_restarted(world)
    running.cancel()
    assert world.restarts == [name]
    assert bool(problems) == is_problem
    assert name in world.times.open_down


async def test_process_that_a_fault_holds_is_not_started_by_another_task() -> None:
    world = FakeWorld(p0=None)
    keeper, _ = kept(world)
    running = asyncio.create_task(keeper.run())
    async with keeper.held("p0"):
        world.children["p0"].exit_code = 0
        for _ in range(10):
            await asyncio.sleep(0)
        assert world.restarts == []
    await until_restarted(world)
    running.cancel()
    assert world.restarts == ["p0"]


async def test_fault_waits_until_its_target_runs_again() -> None:
    world = FakeWorld(p0=0, d0=None)
    keeper, _ = kept(world)
    async with keeper.held("p0", "d0"):
        assert world.children["p0"].exit_code is None
    assert world.restarts == ["p0"]


async def test_restart_that_fails_ends_the_run_with_its_error() -> None:
    world = FakeWorld(p0=0)
    world.failure = ServiceFailed("p0 was not ready")
    keeper, _ = kept(world)
    with pytest.raises(ExceptionGroup) as raised:
        await keeper.run()
    assert [str(error) for error in exceptions_of(raised.value)] == ["p0 was not ready"]
