"""Sizes of tests: a small, seeded part in `make test`, the full size in `make test-long`."""

import os
from typing import TypeVar

T = TypeVar("T")

IS_LONG = os.environ.get("BATON_TEST_LONG", "0") not in ("", "0")
"""True if tests run in full size."""


def sized(short: T, long: T) -> T:
    """Return `short` in `make test` and `long` in `make test-long`."""
    return long if IS_LONG else short
