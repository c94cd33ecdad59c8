"""Predicted over actual seconds of the reloads of a cluster, from the logs of its workers."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

NO_RELOAD = float("nan")


def reload_ratios(logs: Path) -> list[float]:
    """Return the ratio of each complete reload with a predicted time, from all logs below a directory."""
    ratios = []
    for path in sorted(logs.rglob("*.log*")):
        for line in path.read_text().splitlines():
            if "prefix_reloaded" not in line:
                continue
            entry = json.loads(line)
            if entry["predicted_s"] is not None and entry["took_s"] > 0:
                ratios.append(entry["predicted_s"] / entry["took_s"])
    return ratios


def deciles(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentile; `NO_RELOAD` for fewer than two values."""
    found = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [NO_RELOAD] * 9
    return float(found[0]), float(found[4]), float(found[8])
