"""Tests of the scopes that decide when the garbage collector runs."""

import asyncio
import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType

import pytest

from baton.runtime.memory.garbage_collection import (
    collect_when_idle,
    frozen_heap,
    infrequent_gc,
    uncollected_imports,
)
from tests.frozen_objects import unfreezing


@pytest.mark.parametrize("enabled", [True, False])
def test_imports_are_not_collected_but_frozen(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_frozen = gc.get_freeze_count()
    with unfreezing():
        if not enabled:
            gc.disable()
        try:
            with uncollected_imports():
                assert not gc.isenabled()
                imported: list[list[int]] = [[] for _ in range(2000)]
                monkeypatch.setitem(sys.modules, "imported_for_this_test", ModuleType("imported_for_this_test"))
            assert gc.isenabled() == enabled
            assert gc.get_freeze_count() >= num_frozen + len(imported)
        finally:
            gc.enable()


def test_nothing_is_frozen_if_all_modules_were_known() -> None:
    with unfreezing():
        num_frozen = gc.get_freeze_count()
        with uncollected_imports():
            existing: list[list[int]] = [[] for _ in range(2000)]
        assert gc.get_freeze_count() < num_frozen + len(existing) // 2


def test_a_failed_import_enables_collections_again() -> None:
    with unfreezing(), pytest.raises(ImportError), uncollected_imports():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("scope", [frozen_heap, infrequent_gc])
def test_existing_objects_are_frozen_until_the_end_of_the_scope(
    scope: Callable[[], AbstractContextManager[None]],
) -> None:
    threshold, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    existing: list[list[int]] = [[] for _ in range(2000)]
    with unfreezing():
        with scope():
            assert gc.get_freeze_count() > num_frozen + len(existing) // 2
            assert (gc.get_threshold() == threshold) == (scope is frozen_heap)
        assert gc.get_freeze_count() <= num_frozen
        assert gc.get_threshold() == threshold


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


async def test_full_collections_wait_until_the_service_is_idle() -> None:
    threshold = gc.get_threshold()
    answers: asyncio.Queue[bool] = asyncio.Queue()
    asked = asyncio.Event()

    def is_idle() -> bool:
        asked.set()
        return not answers.empty() and answers.get_nowait()

    async def until_asked() -> None:
        asked.clear()
        await asyncio.wait_for(asked.wait(), 60)
        await asyncio.sleep(0)

    gc.set_threshold(700, 10, 0)  # a full collection is always due
    collecting = asyncio.create_task(collect_when_idle(is_idle, check_s=0.0))
    try:
        await until_asked()
        cycle = Cycle()
        gc.collect(1)  # moves it to the oldest generation
        garbage = weakref.ref(cycle)
        del cycle
        await until_asked()
        assert garbage() is not None
        answers.put_nowait(True)
        await until_asked()
        assert garbage() is None
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        restored = gc.get_threshold()
        gc.set_threshold(*threshold)
    assert restored == (700, 10, 0)
