"""Live display of a run, redrawn four times a second by the process that the user started.

Other processes send the requests and report only counts, so drawing does not delay sending.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from loadgen.measure.counts import Counts
from loadgen.measure.request_metrics import RequestOutcome
from loadgen.send.timers import now_s

PLAIN_EVERY_S = 5.0
"""Interval of progress lines without a terminal, in seconds."""
RECENT_S = 5.0
"""Window over which rates are computed, in seconds."""
_GOOD_STYLE = {RequestOutcome.GOOD: "green", RequestOutcome.LATE: "yellow", RequestOutcome.CANCELLED: "dim"}


class LiveView:
    """Implements `ProgressView`: a live panel on a terminal, otherwise a line every few seconds."""

    def __init__(
        self, *, name: str, url: str, num_requests: int, planned_s: float, lag_limit_s: float, is_quiet: bool = False
    ) -> None:
        """`planned_s` is the time from the first to the last planned request. `is_quiet` disables all
        output."""
        self._title = f"{name} → {url}"
        self._num_requests = num_requests
        self._planned_s = planned_s
        self._lag_limit_s = lag_limit_s
        self._is_quiet = is_quiet
        self._is_terminal = sys.stderr.isatty() and not is_quiet
        self._phase = ""
        self._warning = ""
        self._live: Any = None
        self._plain_s = 0.0
        self._last = Counts()
        self._elapsed_s = 0.0
        self._recent: list[tuple[float, int, int, int]] = []

    def __enter__(self) -> Self:
        if self._is_terminal:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show what the run is doing before and after sending."""
        self._phase = text
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        elif not self._is_quiet:
            self._print(text)

    def update(self, counts: Counts, elapsed_s: float) -> None:
        """Show the current counts."""
        self._last, self._elapsed_s = counts, elapsed_s
        now = (
            elapsed_s,
            counts.due,
            counts.sent + counts.in_flight,
            counts.ended,
        )  # `sent` counts only requests that have ended
        self._recent = [entry for entry in self._recent if entry[0] > elapsed_s - RECENT_S] + [now]
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        elif not self._is_quiet and now_s() - self._plain_s >= PLAIN_EVERY_S:
            self._plain_s = now_s()
            self._print(self._line())

    def warn(self, text: str) -> None:
        """Keep the panel on the terminal with an amber warning; without a terminal, print it."""
        self._warning, self._phase = text, "ended"
        if self._live is not None:
            self._live.transient = False
            self._live.update(self._picture(), refresh=True)
        elif not self._is_quiet:
            self._print(text)

    # Internals.

    def _print(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)

    def _line(self) -> str:
        counts = self._last
        lag = counts.lags.percentile(99)
        parts = [
            f"{self._elapsed_s:.0f} s",
            f"due {counts.due}/{self._num_requests}",
            f"in flight {counts.in_flight}",
            *(f"{name} {count}" for name, count in _in_order(counts)),
            f"SLO attainment {attainment(counts)}",
            "send lag p99 -" if lag is None else f"send lag p99 {lag * 1e3:.2f} ms",
        ]
        return "  ".join(parts)

    def _rates(self) -> tuple[float, float, float]:
        """Return the recent rates of requests that were due, sent and ended, per second."""
        first, last = (self._recent[0], self._recent[-1]) if self._recent else ((0.0, 0, 0, 0), (0.0, 0, 0, 0))
        span_s = last[0] - first[0]
        due, sent, ended = (
            (after - before) / span_s if span_s > 0 else 0.0 for before, after in zip(first[1:], last[1:], strict=True)
        )
        return due, sent, ended

    def _picture(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        counts = self._last
        offered, achieved, ended = self._rates()
        lag = counts.lags.percentile(99)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        table.add_row(
            "progress",
            ProgressBar(total=max(1, self._num_requests), completed=counts.ended + counts.in_flight, width=50),
        )
        table.add_row(
            "",
            f"{self._elapsed_s:.0f} s of {self._planned_s:.0f} s + the last responses, {counts.due} of "
            f"{self._num_requests} due",
        )
        table.add_row(
            "rate",
            f"offered {offered:.1f}/s, achieved {achieved:.1f}/s, completed {ended:.1f}/s, in flight "
            f"{counts.in_flight}",
        )
        outcomes = Text("  ").join(
            Text(f"{name} {count}", style=_GOOD_STYLE.get(RequestOutcome(name), "red"))
            for name, count in _in_order(counts)
        )
        table.add_row("outcomes", outcomes)
        table.add_row("SLO attainment", attainment(counts))
        is_late = lag is not None and lag > self._lag_limit_s
        shown = "-" if lag is None else f"p99 {lag * 1e3:.2f} ms, limit {self._lag_limit_s * 1e3:g} ms"
        table.add_row(
            "send lag",
            Text(shown + ("  the run will be INVALID" if is_late else ""), style="bold red" if is_late else ""),
        )
        if counts.not_sent:
            table.add_row(
                "not sent", Text(f"{counts.not_sent}: this machine has no free connections", style="bold red")
            )
        for error, count in counts.errors.most_common(3):
            table.add_row("error", Text(f"{count} × {error}", style="red", no_wrap=True, overflow="ellipsis"))
        if self._warning:
            table.add_row("warning", Text(self._warning, style="bold yellow"))
        return Panel(table, title=self._title, subtitle=self._phase, title_align="left", subtitle_align="right")


class SilentView:
    """Implements `ProgressView` without output."""

    def phase(self, text: str) -> None: ...

    def update(self, counts: Counts, elapsed_s: float) -> None: ...


def attainment(counts: Counts) -> str:
    """Return the SLO attainment among the requests that have ended, as text."""
    ended = counts.ended
    return f"{counts.outcomes[RequestOutcome.GOOD] / ended:.1%} of {ended} ended" if ended else "-"


def _in_order(counts: Counts) -> list[tuple[str, int]]:
    return [(outcome.value, counts.outcomes[outcome]) for outcome in RequestOutcome if counts.outcomes[outcome]]
