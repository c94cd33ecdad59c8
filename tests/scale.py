"""How much of a test runs: `make test` a seeded slice, `make test-long` all of it."""

import os
from typing import TypeVar

T = TypeVar("T")

IS_LONG = os.environ.get("BATON_TEST_LONG", "0") not in ("", "0")
"""Whether tests run in their full size."""


def sized(short: T, long: T) -> T:
    """`short` in `make test`, `long` in `make test-long`."""
    return long if IS_LONG else short
