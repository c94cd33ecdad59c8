"""Counts what happened in the last ten minutes, in intervals of five seconds. Values only; no clock."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

INTERVAL_S = 5.0
NUM_INTERVALS = 120
_SMALLEST_S = 1e-5
_RATIO = 1.04
"""Ratio of the bounds of a histogram bin, so that quantiles are exact to 2 %."""


def _bin_of(seconds: float) -> int:
    return max(0, math.floor(math.log(max(seconds, _SMALLEST_S) / _SMALLEST_S, _RATIO)))


def quantile(bins: Counter[int], share: float) -> float | None:
    """Return the value below which `share` of the observations lie, exact to 2 %; None if there are none."""
    rank = math.ceil(share * bins.total())
    for index in sorted(bins):
        rank -= bins[index]
        if rank <= 0:
            return _SMALLEST_S * float(_RATIO ** (index + 0.5))
    return None


@dataclass(slots=True)
class WindowInterval:
    """Counts of one interval.

    ok, failed, refused: client calls by result, without cancelled ones; `refused` are those with status 429.
    ttft, tpot: histograms of completed requests.
    judged, met: requests with an SLO that ended, and those that met all its terms; without cancelled ones.
    output_tokens: of open requests as counted by the last snapshot, and of ended ones.
    prompt_tokens, cached_tokens, seen_tokens: of completed requests; `seen_tokens` could have been cached.
    """

    begin_s: float = 0.0
    ok: int = 0
    failed: int = 0
    refused: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    tpot: Counter[int] = field(default_factory=Counter)
    judged: int = 0
    met: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seen_tokens: int = 0
    output_tokens: int = 0

    def observe_latency(self, ttft_s: float | None, tpot_s: float | None) -> None:
        """Count the latency of one completed request."""
        if ttft_s is not None:
            self.ttft[_bin_of(ttft_s)] += 1
        if tpot_s is not None:
            self.tpot[_bin_of(tpot_s)] += 1

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return rates over `seconds`, quantiles and shares, as shown in the live view. None: no data."""
        return {
            "ok": round(self.ok / seconds, 3),
            "failed": round(self.failed / seconds, 3),
            "refused": round(self.refused / seconds, 3),
            "ttft_p50": _rounded(quantile(self.ttft, 0.5)),
            "ttft_p95": _rounded(quantile(self.ttft, 0.95)),
            "tpot_p50": _rounded(quantile(self.tpot, 0.5)),
            "tpot_p95": _rounded(quantile(self.tpot, 0.95)),
            "attainment": _share(self.met, self.judged),
            "hit": _share(self.cached_tokens, self.prompt_tokens),
            "ceiling": _share(max(self.seen_tokens, self.cached_tokens), self.prompt_tokens),
            "tokens": round(self.output_tokens / seconds, 1),
        }


class Window:
    """The intervals of the last ten minutes. Times are those of one clock that never goes back."""

    def __init__(self) -> None:
        self._intervals: deque[WindowInterval] = deque(maxlen=NUM_INTERVALS)

    def at(self, now_s: float) -> WindowInterval:
        """Return the interval that contains `now_s`, which is the last one."""
        begin_s = now_s - now_s % INTERVAL_S
        if not self._intervals or self._intervals[-1].begin_s < begin_s:
            self._intervals.append(WindowInterval(begin_s))
        return self._intervals[-1]

    def recent(self, now_s: float, seconds: float = INTERVAL_S * NUM_INTERVALS) -> list[WindowInterval]:
        """Return the intervals that began in the last `seconds`. Intervals without events are missing."""
        return [each for each in self._intervals if each.begin_s > now_s - seconds]

    def rates(self, now_s: float, seconds: float) -> tuple[WindowInterval, float]:
        """Return the sum of the intervals that reach into the last `seconds`, and the seconds they cover."""
        begin_s = math.floor((now_s - seconds) / INTERVAL_S) * INTERVAL_S
        return total(each for each in self._intervals if each.begin_s >= begin_s), now_s - begin_s

    def total(self, now_s: float) -> WindowInterval:
        """Return the sum of the last ten minutes."""
        return total(self.recent(now_s))


def total(intervals: Iterable[WindowInterval]) -> WindowInterval:
    """Return the sum of intervals."""
    result = WindowInterval()
    for each in intervals:
        for name in ("ok", "failed", "refused", "judged", "met"):
            setattr(result, name, getattr(result, name) + getattr(each, name))
        for name in ("prompt_tokens", "cached_tokens", "seen_tokens", "output_tokens"):
            setattr(result, name, getattr(result, name) + getattr(each, name))
        result.ttft.update(each.ttft)
        result.tpot.update(each.tpot)
    return result


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
