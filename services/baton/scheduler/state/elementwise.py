"""Elementwise functions of one number or of an array.

For a single number numpy's functions are ten times slower than Python's, and so is arithmetic with their
results.
"""

from math import ceil as ceil_of_float
from math import exp as exp_of_float
from typing import Any, cast

import numpy as np

from baton.scheduler.state.worker_data import N


def minimum(a: N, b: N | float) -> N:
    return min(a, b) if isinstance(a, float) else np.minimum(a, b)


def maximum(a: N, b: N | float) -> N:
    return max(a, b) if isinstance(a, float) else np.maximum(a, b)


def where(condition: object, a: N | float, b: N) -> N:
    """Return `a` where `condition` holds, else `b`."""
    chosen: Any = (a if condition else b) if isinstance(b, float) else np.where(condition, a, b)  # type: ignore[call-overload]
    return cast(N, chosen)


def ceil(a: N) -> N:
    return float(ceil_of_float(a)) if isinstance(a, float) else np.ceil(a)


def exp(a: N) -> N:
    return exp_of_float(a) if isinstance(a, float) else np.exp(a)
