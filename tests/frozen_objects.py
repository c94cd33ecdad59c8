"""Keeps the objects of the collection frozen, whatever the code under test does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_unfreeze = gc.unfreeze


@contextmanager
def nothing_unfrozen() -> Iterator[None]:
    """Make `gc.unfreeze` do nothing.

    Services and the load generator unfreeze all objects of their process when they end. Each later collection
    would look at what thousands of tests have imported, which takes a second.
    """
    with patch.object(gc, "unfreeze", lambda: None):
        yield


@contextmanager
def unfreezing() -> Iterator[None]:
    """Let `gc.unfreeze` do its work, for tests of it. All objects are frozen again afterwards."""
    try:
        with patch.object(gc, "unfreeze", _unfreeze):
            yield
    finally:
        gc.freeze()
