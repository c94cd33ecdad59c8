"""What an answer does not wait for is done soon, in order, once."""

import asyncio

from baton.scheduler.decisions.deferred_work import DeferredWork


async def test_it_is_done_in_the_next_turn_in_order_and_the_end_comes_once() -> None:
    done: list[str] = []
    afterwards = DeferredWork(after_batch=lambda: done.append("end"))
    afterwards.add(lambda: done.append("a"))
    afterwards.add(lambda: done.append("b"))
    assert done == []
    await asyncio.sleep(0)
    assert done == ["a", "b", "end"]
    await asyncio.sleep(0)
    assert done == ["a", "b", "end"]


async def test_who_must_find_it_done_does_not_wait_for_the_turn() -> None:
    done: list[str] = []
    afterwards = DeferredWork(after_batch=lambda: done.append("end"))
    afterwards.add(lambda: done.append("a"))
    afterwards.run_pending()
    assert done == ["a"]
    await asyncio.sleep(0)
    assert done == ["a", "end"]


async def test_a_turn_without_work_has_its_end_too() -> None:
    done: list[str] = []
    DeferredWork(after_batch=lambda: done.append("end")).schedule()
    await asyncio.sleep(0)
    assert done == ["end"]


async def test_one_that_fails_keeps_none_of_the_others_from_being_done() -> None:
    done: list[str] = []
    afterwards = DeferredWork(after_batch=lambda: done.append("end"))

    def fail() -> None:
        raise RuntimeError("a bug")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    afterwards.add(fail)
    afterwards.add(lambda: done.append("b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == ["b", "end"]
    assert len(told) == 1
