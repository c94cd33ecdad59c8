"""Deferred work runs soon, in order, and once."""

import asyncio

from baton.scheduler.decisions.deferred_work import DeferredWork


async def test_work_runs_in_order_in_the_next_iteration_and_after_batch_once() -> None:
    done: list[str] = []
    deferred = DeferredWork(after_batch=lambda: done.append("end"))
    deferred.add(lambda: done.append("a"))
    deferred.add(lambda: done.append("b"))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["a", "b", "end"]
    await asyncio.sleep(0)
    assert done == ["a", "b", "end"]


async def test_run_pending_runs_work_immediately() -> None:
    done: list[str] = []
    deferred = DeferredWork(after_batch=lambda: done.append("end"))
    deferred.add(lambda: done.append("a"))
    deferred.run_pending()
    assert done == ["a"]
    await asyncio.sleep(0)
    assert done == ["a", "end"]


async def test_scheduled_iteration_without_work_calls_after_batch() -> None:
    done: list[str] = []
    DeferredWork(after_batch=lambda: done.append("end")).schedule()
    await asyncio.sleep(0)
    assert done == ["end"]


async def test_failing_work_does_not_stop_the_rest() -> None:
    done: list[str] = []
    deferred = DeferredWork(after_batch=lambda: done.append("end"))

    def fail() -> None:
        raise RuntimeError("a bug")

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    deferred.add(fail)
    deferred.add(lambda: done.append("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == ["b", "end"]
    assert len(errors) == 1
