"""Random numbers that stay the same: one stream for each purpose, and distributions made of uniform numbers
alone.

numpy promises the bits of PCG64, but not that `Generator.gamma` and its like will make the same numbers of
them in its next version. So each distribution here is a transform of `Generator.random`. What is left to
differ between machines is the last bit of a logarithm; plans round to microseconds and whole tokens.

A purpose has its own stream, so that another choice of lengths, say, leaves the arrivals as they were. All
draws are made row by row: the first n of a longer sequence are the n of a shorter one.
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
    """The generator of `purpose` under `seed`, independent of every other purpose's. Raises BadPlan for a
    seed below 0."""
    if seed < 0:
        raise BadPlan(f"the seed {seed} is below 0")
    digest = hashlib.sha256(purpose.encode()).digest()
    key = [int.from_bytes(digest[start : start + 4], "little") for start in (0, 4, 8, 12)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def exponential(rng: np.random.Generator, count: int) -> Floats:
    """Mean 1: `-ln(1 - u)`."""
    return -np.log1p(-rng.random(count))


def normal(rng: np.random.Generator, count: int) -> Floats:
    """Mean 0, variance 1. Source: Box and Muller 1958, the cosine half."""
    u = rng.random((count, 2))
    return np.sqrt(-2 * np.log1p(-u[:, 0])) * np.cos(2 * np.pi * u[:, 1])


def gamma(rng: np.random.Generator, shape: float, count: int) -> Floats:
    """Scale 1, mean `shape`. Source: Marsaglia and Tsang 2000; below shape 1 their `gamma(shape + 1)
    u^(1/shape)`.

    Attempts that are refused are made again after all others, so only a `count` that stays the same repeats
    the same numbers.
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
            kept = (v > 0) & (np.log(u) < x * x / 2 + d - d * v + d * np.log(v))
        values[missing[kept]] = d * v[kept]
        missing = missing[~kept]
    if shape < 1:
        values *= (1 - rng.random(count)) ** (1 / shape)
    return values


def weibull(rng: np.random.Generator, shape: float, count: int) -> Floats:
    """Scale 1: `(-ln(1 - u))^(1/shape)`, mean `Γ(1 + 1/shape)`."""
    values: Floats = exponential(rng, count) ** (1 / shape)
    return values


def choose(rng: np.random.Generator, weights: Sequence[float], count: int) -> NDArray[np.int64]:
    """`count` positions in `weights`, each with probability in proportion to its weight. Weights are not
    negative, one of them is positive."""
    bounds = np.cumsum(np.asarray(weights, np.float64))
    positions = np.searchsorted(bounds, rng.random(count) * bounds[-1], side="right")
    return np.minimum(positions, int(np.flatnonzero(weights)[-1])).astype(np.int64)


def zipf_weights(count: int, exponent: float) -> Floats:
    """Popularity of the 1st, 2nd, … of `count`: `1 / rank^exponent`; exponent 0: all alike."""
    weights: Floats = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights
