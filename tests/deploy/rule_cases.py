"""Evaluates rules over series in the format of `promtool test rules`, with the evaluator in `promql`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as ast
import yaml

from tests.deploy.promql import NAME, STALE, Database, Labels

_SERIES = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)?(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'\s*(\w+)\s*=\s*"([^"]*)"\s*(?:,|$)')
_VALUE = re.compile(r"(?P<start>-?[\d.]+|_|stale)(?:(?P<step>[+-][\d.]+)?x(?P<times>\d+))?")


@dataclass(frozen=True)
class Firing:
    """A firing alert, without the labels of its rule."""

    alert: str
    labels: Labels


def labels_of(series: str) -> dict[str, str]:
    """Parse `name{label="value"}` into labels."""
    found = _SERIES.fullmatch(series)
    assert found is not None, series
    labels = dict(_LABEL.findall(found["labels"] or ""))
    return labels | ({NAME: found["name"]} if found["name"] else {})


def values_of(text: str) -> Iterator[float | str | None]:
    """Expand promtool's notation: `1 2 _ stale`, `0+10x3` = 0 10 20 30, `5x2` = 5 5 5, `_x2` = two gaps."""
    for word in text.split():
        found = _VALUE.fullmatch(word)
        assert found is not None, word
        times = int(found["times"] or 0)
        if found["start"] == "_":
            yield from ["_"] * max(1, times)
        elif found["start"] == "stale":
            yield STALE
        else:
            step = float(found["step"] or 0)
            yield from (float(found["start"]) + step * i for i in range(times + 1))


def database_of(case: Mapping[str, Any], interval_s: float) -> Database:
    database = Database()
    for given in case["input_series"]:
        labels = labels_of(given["series"])
        for index, value in enumerate(values_of(str(given["values"]))):
            if value != "_":
                assert not isinstance(value, str)
                database.add(labels, index * interval_s, value)
    return database


def firing_at(rules: Mapping[str, Any], database: Database, end_s: float, interval_s: float) -> set[Firing]:
    """Return the alerts that fire at `end_s` if the rules were evaluated every `interval_s` since 0."""
    active_since: dict[tuple[str, Labels], float] = {}
    firing: set[Firing] = set()
    at_s = 0.0
    while at_s <= end_s:
        firing = set()
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            found = database.vector(rule["expr"], at_s)
            if "record" in rule:
                for labels, value in found.items():
                    database.add({**dict(labels), NAME: rule["record"]}, at_s, value)
                continue
            here = {frozenset((k, v) for k, v in labels if k != NAME) for labels in found}
            for key in [key for key in active_since if key[0] == rule["alert"] and key[1] not in here]:
                del active_since[key]
            for labels in here:
                since_s = active_since.setdefault((rule["alert"], labels), at_s)
                if at_s - since_s >= seconds(rule.get("for", "0s")):
                    firing.add(Firing(rule["alert"], labels))
        at_s += interval_s
    return firing


def seconds(duration: str) -> float:
    """Parse a Prometheus duration. Raises ValueError if it is invalid."""
    return float(ast.parse_duration(duration).total_seconds()) if duration not in ("0", "0s") else 0.0


def load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content
