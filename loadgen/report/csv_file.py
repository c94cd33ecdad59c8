"""Writes `requests.csv`: one line per request with all derived metrics. Unknown values are empty."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loadgen.report.run_view import RunView

MEASURED = ("send_lag", "ttft", "ttft_sent", "tpot", "tbt", "e2e", "e2e_sent", "normalised", "queue")
INSIDE = ("waiting", "placement", "prefill", "kv_wait", "transfer", "exposed", "admission", "first_decode", "decode")
PREDICTED = ("predicted_ttft", "placed_ttft", "predicted_tpot", "placed_tpot")
"""Predictions made at placement, and the values that the server measured."""
COLUMNS = (
    *"run valid warm_cache index session turn tenant priority slo_class outcome intended_s sent_s ended_s".split(),
    *(f"{name}_ms" for name in MEASURED),
    *"prompt_tokens cached_tokens output_tokens planned_prompt_tokens planned_output_tokens status finish_reason "
    "reason error".split(),
    *"endpoint request_id prefill_worker decode_worker".split(),
    *(f"{name}_ms" for name in (*INSIDE, *PREDICTED)),
    *"kv_bytes kv_early_bytes attempts".split(),
)


def write_requests(runs: Sequence[RunView], path: Path) -> None:
    """Write the requests of all runs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run in runs:
            writer.writerows(_rows(run))


def _rows(run: RunView) -> Iterator[list[Any]]:
    measures = run.measures
    for row, (record, outcome, stages) in enumerate(
        zip(measures.records, measures.outcomes, measures.stages, strict=True)
    ):
        yield [
            *(
                run.name,
                "no" if run.invalid else "yes",
                "yes" if run.cache.is_warm else "" if run.cache.why else "no",
                record.index,
                record.session,
                record.turn,
                record.tenant,
                record.priority,
                record.slo_class,
                outcome,
            ),
            *(_number(value) for value in (record.intended_s, record.sent_s, record.ended_s)),
            *(_number(measures.columns[name][row] * 1e3) for name in MEASURED),
            *(_integer(measures.columns[name][row]) for name in ("prompt_tokens", "cached_tokens", "output_tokens")),
            *(_number(value) for value in (record.planned_prompt_tokens, record.planned_output_tokens, record.status)),
            *(
                _text(text)
                for text in (record.finish_reason, record.reason, record.error, record.endpoint, record.request_id)
            ),
            *(stages.prefill_worker, stages.decode_worker),
            *(
                _number(None if (value := getattr(stages, f"{name}_s")) is None else value * 1e3)
                for name in (*INSIDE, *PREDICTED)
            ),
            *(_number(value) for value in (stages.kv_bytes, stages.early_bytes, stages.attempts)),
        ]


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.9g}"


def _integer(value: float) -> str:
    return "" if math.isnan(value) else str(int(value))


def _text(value: str) -> str:
    """Return server text on one line, quoted so that a spreadsheet does not take it for a formula."""
    text = " ".join(value.split())
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
