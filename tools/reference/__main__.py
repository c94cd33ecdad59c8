"""Writes the pages of `docs/reference/`: `python -m tools.reference`; `--check` only names stale pages."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.reference.cli_page import cli_page
from tools.reference.config_page import config_page
from tools.reference.errors_page import errors_page
from tools.reference.evidence_page import evidence_page
from tools.reference.grpc_page import grpc_page
from tools.reference.http_page import http_page
from tools.reference.metrics_page import metrics_page

OUT = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
    "http-api.md": http_page,
    "grpc-api.md": grpc_page,
    "errors.md": errors_page,
    "test-evidence.md": evidence_page,
}


def stale(out: Path = OUT) -> list[str]:
    """Names of pages that are missing or differ from what the code says now."""
    return [
        name
        for name, make in PAGES.items()
        if not (out / name).exists() or (out / name).read_text(encoding="utf-8") != make()
    ]


def main(arguments: list[str]) -> int:
    """Write stale pages, or with `--check` name them. Exit code 1 if a check finds one."""
    names = stale()
    if "--check" in arguments:
        for name in names:
            print(f"docs/reference/{name} is stale: run `make reference`")
        return int(bool(names))
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names:
        (OUT / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
