"""Progress counts of a run, small enough to be sent between processes and added up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

_FIRST_S = 1e-5
_STEP = 1.15
_NUM_BUCKETS = 120
"""Covers delays up to almost three minutes, in buckets that grow by 15 %."""


class LagHistogram:
    """Histogram of delays with exponentially growing buckets."""

    def __init__(self) -> None:
        self._buckets = [0] * _NUM_BUCKETS
        self.count = 0
        self.maximum_s = 0.0

    def add(self, lag_s: float) -> None:
        """Count one delay."""
        bucket = int(math.log(lag_s / _FIRST_S, _STEP)) + 1 if lag_s > _FIRST_S else 0
        self._buckets[min(bucket, _NUM_BUCKETS - 1)] += 1
        self.count += 1
        self.maximum_s = max(self.maximum_s, lag_s)

    def percentile(self, q: float) -> float | None:
        """Return the q-th percentile in seconds, rounded up to the end of its bucket. None without values."""
        if not self.count:
            return None
        left = self.count * q / 100
        for bucket, count in enumerate(self._buckets):
            left -= count
            if left <= 0:
                return min(_FIRST_S * _STEP**bucket, self.maximum_s)
        return self.maximum_s

    def __iadd__(self, other: LagHistogram) -> Self:
        self._buckets = [mine + theirs for mine, theirs in zip(self._buckets, other._buckets, strict=True)]
        self.count += other.count
        self.maximum_s = max(self.maximum_s, other.maximum_s)
        return self

    def to_json(self) -> dict[str, Any]:
        return {
            "buckets": {index: count for index, count in enumerate(self._buckets) if count},
            "maximum_s": self.maximum_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        made = cls()
        for index, count in data["buckets"].items():
            made._buckets[int(index)] = count
            made.count += count
        made.maximum_s = data["maximum_s"]
        return made


class Counts:
    """Progress of a run.

    - `due`: requests whose planned time has come, including dropped later turns
    - `sent`: ended requests that were sent
    - `in_flight`: sent and not ended
    - `not_sent`: requests that this machine could not send
    """

    def __init__(self) -> None:
        self.due = 0
        self.sent = 0
        self.in_flight = 0
        self.not_sent = 0
        self.tokens = 0
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.lags = LagHistogram()
        self.cpu_s = 0.0

    @property
    def ended(self) -> int:
        """Number of requests that have ended."""
        return sum(self.outcomes.values())

    def __iadd__(self, other: Counts) -> Self:
        for name in ("due", "sent", "in_flight", "not_sent", "tokens", "cpu_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes.update(other.outcomes)
        self.errors.update(other.errors)
        self.lags += other.lags
        return self

    def to_json(self) -> dict[str, Any]:
        data = {name: getattr(self, name) for name in ("due", "sent", "in_flight", "not_sent", "tokens", "cpu_s")}
        return {
            **data,
            "outcomes": self.outcomes,
            "errors": dict(self.errors.most_common(5)),
            "lags": self.lags.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        made = cls()
        for name in ("due", "sent", "in_flight", "not_sent", "tokens", "cpu_s"):
            setattr(made, name, data[name])
        made.outcomes.update(data["outcomes"])
        made.errors.update(data["errors"])
        made.lags = LagHistogram.from_json(data["lags"])
        return made
