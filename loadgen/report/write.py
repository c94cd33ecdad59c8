"""Reads result directories and writes the files of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.loadgen_errors import BadRecords, LoadgenError
from loadgen.measure.prefix_hits import best_ratios, judge_cache
from loadgen.measure.records_file import Result, read_result
from loadgen.measure.result_plan import plan_of
from loadgen.plan.drawn_rate import offered_text
from loadgen.plan.plan import Plan
from loadgen.report.csv_file import write_requests
from loadgen.report.markdown import markdown
from loadgen.report.page import page
from loadgen.report.report_json import report_of
from loadgen.report.run_view import RunView, colors, unique_names, view
from loadgen.slo_target import SloTarget, override_slos

BLOCK_SIZE_TOKENS = 16
"""KV block size assumed for servers that do not report it; most engines use it by default."""


def views_of(
    directories: Sequence[Path],
    *,
    slos: Sequence[tuple[str | None, SloTarget]] = (),
    workers: int | None = None,
    kv_tokens: int | None = None,
) -> list[RunView]:
    """Read results and prepare them for a report.

    The arguments replace what a run recorded; `slos` are applied as `slo_target.override_slos` does. Raises
    BadRecords, also for a result without records, and BadSlo.
    """
    results = [read_result(directory) for directory in directories]
    found = []
    for number, (result, name, color) in enumerate(zip(results, unique_names(results), colors(results), strict=True)):
        if not result.records:
            raise BadRecords(f"{result.path}: no request has ended, so there is nothing to report")
        plan, why_no_plan = plan_of(result)
        overridden = override_slos(result.run.slos, slos) if slos else None
        found.append(
            view(
                result,
                number=number,
                name=name,
                color=color,
                slos=overridden,
                best_hits=_best_hits(result, plan, kv_tokens),
                cache=judge_cache(result.records, plan, why_no_plan),
                offered_text=""
                if plan is None
                else offered_text(plan, "planned" if result.run.interrupted else "offered"),
                workers=workers,
            )
        )
    return found


def write_report(runs: Sequence[RunView], directory: Path, version: str = "") -> list[Path]:
    """Write the four files, replacing older ones, and return their paths, the page first.

    Raises LoadgenError if a file cannot be written.
    """
    report = report_of(runs, version)
    texts = {
        "report.html": page(report),
        "report.json": json.dumps(report, ensure_ascii=False, indent=1, allow_nan=False) + "\n",
        "report.md": markdown(report),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        write_requests(runs, directory / "requests.csv")
    except OSError as error:
        raise LoadgenError(
            f"{error.filename or directory} cannot be written ({error.strerror or error}); give another --out"
        ) from error
    return [directory / name for name in ("report.html", "report.json", "requests.csv", "report.md")]


def _best_hits(result: Result, plan: Plan | None, kv_tokens: int | None) -> dict[str, float]:
    """Return the best possible prefix hit ratios by cache name.

    `kv_tokens` is the whole server's KV cache size and replaces what the run recorded.
    """
    if plan is None:
        return {}
    server = result.run.server
    block, capacity = server.get("block_size_tokens"), kv_tokens or server.get("kv_tokens")
    return best_ratios(
        result.records,
        plan,
        block_size_tokens=block if isinstance(block, int) and block > 0 else BLOCK_SIZE_TOKENS,
        capacity_tokens=capacity if isinstance(capacity, int) else None,
    )
