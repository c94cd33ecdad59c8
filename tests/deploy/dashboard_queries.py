"""Queries of the dashboard, with Grafana's variables replaced."""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "helm/baton/files/dashboards/baton.json"


def dashboard() -> dict[str, Any]:
    content = json.loads(FILE.read_text())
    assert isinstance(content, dict)
    return content


def filled(query: str, rate_interval: str) -> str:
    return query.replace("$__rate_interval", rate_interval).replace("$namespace", ".*")


def queries(rate_interval: str = "5m") -> list[tuple[str, str]]:
    """Return (panel and legend, query) of each query."""
    return [
        (f"{panel['title']}: {target['legendFormat']}", filled(target["expr"], rate_interval))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]
