"""Controls the garbage collector: not during imports, rarely under load, fully while a service is idle."""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

MAX_POSTPONED = 100
"""Collections of the middle generation, each of about 7,000 new objects, before a full one under load."""


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import modules without garbage collections, then exclude all existing objects from later ones.

    Collections during the import of torch and transformers take a fifth of its time and find little, because
    modules stay. The effect is process-wide. Unreachable cycles that exist at the end are kept until
    `frozen_heap` ends. If no module was new, no object is excluded.
    """
    enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Exclude all existing objects from garbage collection while the scope lasts.

    Without it, a full collection traverses every module and class. That costs a seventh of a gateway's time
    per request, and now and then a pause of 0.2 s in a worker with torch. The effect is process-wide: the
    first scope that ends, ends it for all.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """Combine `frozen_heap` with rarer collections of new objects, for services that create few cycles.

    The default threshold of 700 objects is noticeable in a service that answers within fractions of a
    millisecond.
    """
    before = gc.get_threshold()
    with frozen_heap():
        gc.set_threshold(20_000, 20, 50)
        try:
            yield
        finally:
            gc.set_threshold(*before)


async def collect_when_idle(is_idle: Callable[[], bool], check_s: float = 1.0) -> None:
    """Run full garbage collections only while the service is idle, until cancelled.

    A full collection stops the event loop for 0.6 µs or more per live object: for 50 ms with 500 open
    requests. An idle service has few. After `MAX_POSTPONED` one runs under load, too, which bounds the
    garbage in cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], MAX_POSTPONED)
    try:
        while True:
            await asyncio.sleep(check_s)
            if is_idle() and gc.get_count()[2] >= before[2]:
                gc.collect()
    finally:
        gc.set_threshold(*before)
