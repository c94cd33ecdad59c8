"""Reproducible random numbers: one stream for each purpose, and distributions made from uniform numbers only.

numpy guarantees the bits of PCG64, but not that `Generator.gamma` and others produce the same numbers in the
next version. So each distribution here is a transform of `Generator.random`. Machines can differ only in the
last bit of a logarithm; plans round to microseconds and whole tokens.

Each purpose has its own stream, so that other lengths, for example, leave the arrivals unchanged. Draws are
made row by row: the first n of a longer sequence equal a shorter sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from loadgen.loadgen_errors import BadPlan

Floats: TypeAlias = "NDArray[np.float64]"


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of `purpose` for `seed`, independent of all other purposes. Raises BadPlan for a
    negative seed."""
    if seed < 0:
        raise BadPlan(f"the seed is {seed}; it must not be negative")
    digest = hashlib.sha256(purpose.encode()).digest()
    key = [int.from_bytes(digest[start : start + 4], "little") for start in (0, 4, 8, 12)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def exponential(rng: np.random.Generator, count: int) -> Floats:
    """Draw exponential numbers with mean 1: `-ln(1 - u)`."""
    return -np.log1p(-rng.random(count))


def normal(rng: np.random.Generator, count: int) -> Floats:
    """Draw normal numbers with mean 0 and variance 1. Source: Box and Muller 1958, the cosine half."""
    u = rng.random((count, 2))
    return np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1])


def gamma(rng: np.random.Generator, shape: float, count: int) -> Floats:
    """Draw gamma numbers with scale 1 and mean `shape`.

    Source: Marsaglia and Tsang 2000; below shape 1 their `gamma(shape + 1) u^(1/shape)`. Rejected attempts
    are repeated after all others, so numbers are reproducible only for an equal `count`.
    """
    boosted = shape if shape >= 1 else shape + 1
    d = boosted - 1 / 3
    c = 1 / np.sqrt(9 * d)
    values = np.empty(count)
    missing = np.arange(count)
    while missing.size:
        x = normal(rng, missing.size)
        u = rng.random(missing.size)
        v = (1 + c * x) ** 3
        with np.errstate(invalid="ignore", divide="ignore"):
            accepted = (v > 0) & (np.log(u) < x * x / 2 + d - d * v + d * np.log(v))
        values[missing[accepted]] = d * v[accepted]
        missing = missing[~accepted]
    if shape < 1:
        values *= (1 - rng.random(count)) ** (1 / shape)
    return values


def weibull(rng: np.random.Generator, shape: float, count: int) -> Floats:
    """Draw Weibull numbers with scale 1 and mean `Γ(1 + 1/shape)`: `(-ln(1 - u))^(1/shape)`."""
    values: Floats = exponential(rng, count) ** (1 / shape)
    return values


def choose(rng: np.random.Generator, weights: Sequence[float], count: int) -> NDArray[np.int64]:
    """Draw `count` positions in `weights` with probabilities proportional to them.

    Weights must not be negative, and one must be positive.
    """
    bounds = np.cumsum(np.asarray(weights, np.float64))
    positions = np.searchsorted(bounds, rng.random(count) * bounds[-1], side="right")
    return np.minimum(positions, int(np.flatnonzero(weights)[-1])).astype(np.int64)


def zipf_weights(count: int, exponent: float) -> Floats:
    """Return the popularity of ranks 1 to `count`: `1 / rank^exponent`. Exponent 0 is uniform."""
    weights: Floats = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights
