"""Repeated warnings are counted, and log files are bounded."""

import logging
from pathlib import Path

from baton.runtime.log_limits import MAX_EVENTS, NUM_OLD_FILES, BoundedLogFile, RepeatLimit


def record(event: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    return logging.LogRecord("baton.x", level, "", 0, {"event": event, **fields}, None, None)  # type: ignore[arg-type]


def test_repeats_of_an_event_are_dropped_and_counted_in_the_next_window() -> None:
    now_s = 0.0
    limit = RepeatLimit(max_repeats=3, window_s=60.0, clock=lambda: now_s)
    assert [limit.filter(record("a")) for _ in range(5)] == [True, True, True, False, False]
    assert limit.filter(record("b"))
    assert limit.filter(record("a", logging.INFO)), "only warnings and errors are limited"
    now_s = 60.5
    again = record("a")
    assert limit.filter(again)
    assert again.msg == {"event": "a", "suppressed": 2}  # type: ignore[comparison-overlap]


def test_number_of_counted_events_is_bounded() -> None:
    limit = RepeatLimit(max_repeats=1)
    for number in range(3 * MAX_EVENTS):
        assert limit.filter(record(f"event-{number}"))
    assert len(limit._seen) == MAX_EVENTS


def test_files_rotate_within_their_limit(tmp_path: Path) -> None:
    handler = BoundedLogFile(tmp_path / "gateway.log", max_bytes=10_000)
    try:
        for number in range(1000):
            handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"{number} " + "x" * 90, None, None))
    finally:
        handler.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["gateway.log", *(f"gateway.log.{n + 1}" for n in range(NUM_OLD_FILES))]
    assert all(file.stat().st_size <= 10_000 for file in files)


def test_full_disk_loses_lines_and_raises_nothing() -> None:
    handler = BoundedLogFile(Path("/dev/full"), max_bytes=0)
    try:
        for _ in range(3):
            handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "line", None, None))
        assert handler.num_lost == 3
    finally:
        handler.stream = None  # type: ignore[assignment] - closing it would flush, and fail
