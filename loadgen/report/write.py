"""Reads result directories and writes the files of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadgen.loadgen_errors import BadPlan, BadRecords, LoadgenError
from loadgen.measure.records_file import Result, read_result
from loadgen.plan.cache_model import best_hits
from loadgen.plan.plan_file import read_plan
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
        hits, notes = best_prefix_hits(result, kv_tokens)
        overridden = override_slos(result.run.slos, slos) if slos else None
        found.append(
            view(
                result,
                number=number,
                name=name,
                color=color,
                slos=overridden,
                best_hits=hits,
                workers=workers,
                notes=notes,
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


def best_prefix_hits(result: Result, kv_tokens: int | None = None) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return ({cache name: best possible hit ratio}, notes).

    The ratio covers exactly the requests whose hits the server reported, so that the two can be compared.
    `kv_tokens` is the whole server's KV cache size and replaces what the run recorded. Empty if the server
    reported no hits, or if the plan is missing or has texts.
    """
    reported = [
        record for record in result.records if record.num_cached_tokens is not None and record.num_prompt_tokens
    ]
    path = result.plan_path
    if not reported or path is None:
        return {}, ()
    try:
        plan = read_plan(path)
        server = result.run.server
        block = server.get("block_size_tokens")
        block = block if isinstance(block, int) and block > 0 else BLOCK_SIZE_TOKENS
        capacity = kv_tokens or server.get("kv_tokens")
        caches = {"plan's best, infinite cache": best_hits(plan, block_size_tokens=block)}
        if isinstance(capacity, int) and capacity >= block:
            caches[f"plan's best, LRU of {capacity:,} tokens"] = best_hits(
                plan, block_size_tokens=block, capacity_tokens=capacity
            )
    except BadPlan as error:
        return {}, (f"no best prefix hit ratio: {error}",)
    if any(record.index >= len(plan.requests) for record in reported):
        return {}, (f"{path.name} is not the plan of these records: it has only {len(plan.requests)} requests",)
    ratios = {}
    for name, use in caches.items():
        prompt = sum(use.num_prompt_tokens[record.index] for record in reported)
        ratios[name] = sum(use.num_cached_tokens[record.index] for record in reported) / prompt
    return ratios, ()
