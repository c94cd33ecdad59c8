"""All requests of a run as columns, with each metric computed once.

NaN means that a request has no value. Rows are in the order of intended times, which the confidence intervals
of `loadgen.measure.stats` require.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loadgen.measure import request_metrics
from loadgen.measure.records import Record
from loadgen.measure.request_metrics import COMPLETE, OutcomeRules, RequestOutcome
from loadgen.measure.stats import Floats
from loadgen.measure.timeline import Stages

Flags = NDArray[np.bool_]
SLOS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Metrics of all requests as arrays.

    - `columns`: values by metric name, [requests], in seconds or counts
    - `has_slo[slo]`, `met[slo]`: whether the request has that SLO and met it, [requests]; only complete
      responses can meet it
    - `token_times`, `token_rows`: arrival and request row of each token, [tokens], whatever the request's
      outcome
    - `gaps`, `gap_rows`: gaps between tokens of complete responses and their request rows, [gaps]
    """

    records: tuple[Record, ...]
    stages: tuple[Stages, ...]
    outcomes: tuple[RequestOutcome, ...]
    columns: dict[str, Floats]
    has_slo: dict[str, Flags]
    met: dict[str, Flags]
    token_times: Floats
    token_rows: NDArray[np.intp]
    gaps: Floats
    gap_rows: NDArray[np.intp]

    @classmethod
    def of(cls, records: Sequence[Record], rules: OutcomeRules) -> Measures:
        """Compute all metrics of the records."""
        rows = tuple(sorted(records, key=lambda record: (record.intended_s, record.index)))
        stages = tuple(Stages.of(record.timeline) for record in rows)
        outcomes = tuple(request_metrics.classify(record, rules) for record in rows)
        complete = np.array([outcome in COMPLETE for outcome in outcomes], dtype=np.bool_)
        times, token_rows = _tokens(rows)
        is_gap = token_rows[1:] == token_rows[:-1]
        gaps, gap_rows = np.diff(times)[is_gap], token_rows[1:][is_gap]
        columns = {
            name: np.array([_number(value) for value in map(measure, rows)], dtype=np.float64)
            for name, measure in _OF_RECORD.items()
        }
        edges = np.searchsorted(gap_rows, np.arange(len(rows) + 1))
        columns["tbt"] = np.array(
            [_number(request_metrics.longest_tenth(gaps[start:end])) for start, end in pairwise(edges)],
            dtype=np.float64,
        )
        columns["queue"] = np.array([_number(stage.wait_s) for stage in stages], dtype=np.float64)
        has_slo = {slo: np.zeros(len(rows), dtype=np.bool_) for slo in SLOS}
        met = {slo: np.zeros(len(rows), dtype=np.bool_) for slo in SLOS}
        for row, record in enumerate(rows):
            for slo, is_met in request_metrics.met_slos(record, rules.slo_of(record)).items():
                has_slo[slo][row] = True
                met[slo][row] = is_met and complete[row]
        of_complete = complete[gap_rows]
        return cls(
            records=rows,
            stages=stages,
            outcomes=outcomes,
            columns=columns,
            has_slo=has_slo,
            met=met,
            token_times=times,
            token_rows=token_rows,
            gaps=gaps[of_complete],
            gap_rows=gap_rows[of_complete],
        )

    def __len__(self) -> int:
        return len(self.records)

    @property
    def complete(self) -> Flags:
        """True for requests with a complete response, [requests]."""
        return np.array([outcome in COMPLETE for outcome in self.outcomes], dtype=np.bool_)

    @property
    def good(self) -> Flags:
        """True for requests that met their SLO, [requests]."""
        return np.array([outcome is RequestOutcome.GOOD for outcome in self.outcomes], dtype=np.bool_)

    def of_complete(self, metric: str) -> Floats:
        """Return a metric's values of the complete responses that have it, in row order."""
        values = self.columns[metric]
        return values[self.complete & ~np.isnan(values)]

    def select(self, rows: Sequence[int] | NDArray[np.intp]) -> Measures:
        """Return the given rows, in their order."""
        index = np.asarray(rows, dtype=np.intp)
        place = np.full(len(self), -1, dtype=np.intp)
        place[index] = np.arange(index.size)
        tokens, gaps = place[self.token_rows] >= 0, place[self.gap_rows] >= 0
        return Measures(
            records=tuple(self.records[row] for row in index),
            stages=tuple(self.stages[row] for row in index),
            outcomes=tuple(self.outcomes[row] for row in index),
            columns={name: values[index] for name, values in self.columns.items()},
            has_slo={slo: flags[index] for slo, flags in self.has_slo.items()},
            met={slo: flags[index] for slo, flags in self.met.items()},
            token_times=self.token_times[tokens],
            token_rows=place[self.token_rows[tokens]],
            gaps=self.gaps[gaps],
            gap_rows=place[self.gap_rows[gaps]],
        )


def _tokens(records: Sequence[Record]) -> tuple[Floats, NDArray[np.intp]]:
    """Return (arrival time of each token, row of its request), both [tokens]."""
    times = np.fromiter((arrival.at_s for record in records for arrival in record.arrivals), np.float64)
    counts = np.fromiter((arrival.num_tokens for record in records for arrival in record.arrivals), np.intp)
    rows = np.repeat(np.arange(len(records)), [len(record.arrivals) for record in records])
    return np.repeat(times, counts), np.repeat(rows, counts)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


_OF_RECORD = {
    "intended": lambda record: record.intended_s,
    "sent": lambda record: record.sent_s,
    "ended": lambda record: record.ended_s,
    "send_lag": request_metrics.send_lag_s,
    "ttft": request_metrics.ttft_s,
    "ttft_sent": lambda record: request_metrics.ttft_s(record, from_intended=False),
    "tpot": request_metrics.tpot_s,
    "e2e": request_metrics.e2e_s,
    "e2e_sent": lambda record: request_metrics.e2e_s(record, from_intended=False),
    "normalised": request_metrics.normalised_s,
    "output_tokens": lambda record: request_metrics.num_output_tokens(record),
    "prompt_tokens": lambda record: record.num_prompt_tokens,
    "cached_tokens": lambda record: record.num_cached_tokens,
    "messages": lambda record: sum(1 for arrival in record.arrivals if arrival.num_tokens) or None,
}
