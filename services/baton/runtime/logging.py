"""Structured logging: events with fields, as JSON in one file per process or as text on a terminal.

`get_logger` may be called at import; `configure` sets the destination once per process. Messages of other
libraries go to the same destination.
"""

import faulthandler
import logging
import sys
from collections.abc import Mapping, MutableMapping
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.typing import Processor

from baton.runtime.log_limits import BoundedLogFile, RepeatLimit

_SHARED: tuple[Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.processors.StackInfoRenderer(),
)
_BEFORE_STDLIB: tuple[Processor, ...] = (
    structlog.stdlib.filter_by_level,
    *_SHARED,
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
)
_HANDLER = "baton"
_QUIET: Mapping[str, int] = {"asyncio": logging.WARNING, "httpcore": logging.WARNING, "httpx": logging.WARNING}
"""Minimum levels of libraries that log one `info` line per request."""


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose methods take an event name and fields.

    Example: `log.info("kv_pull_done", transfer_bytes=n, duration_s=t)`.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name), processors=_BEFORE_STDLIB, wrapper_class=structlog.stdlib.BoundLogger
    )
    return logger


def configure(
    name: str, *, level: str = "info", log_dir: Path | None = None, stream: TextIO | None = None, **fields: object
) -> Path | None:
    """Send this process's logs to `{log_dir}/{name}.log`, or to `stream` (standard error) without `log_dir`.

    A terminal gets coloured text; a file or any other stream gets JSON lines. Every line contains `fields`
    and the field `process`, which is `name`. A crash in native code writes its stacks to the file. Files
    rotate, and an event that repeats too often is counted instead of written. A second call replaces the
    first. Returns the path of the file, or None. Raises OSError if it cannot be opened.
    """
    _remove_handler()
    path: Path | None = None
    if log_dir is None:
        stream = stream or sys.stderr
        handler: logging.Handler = logging.StreamHandler(stream)
        handler.setFormatter(_formatter(stream.isatty(), {"process": name, **fields}))
    else:
        path = log_dir.expanduser() / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = BoundedLogFile(path)
        handler.setFormatter(_formatter(False, {"process": name, **fields}))
    handler.addFilter(RepeatLimit())
    handler.set_name(_HANDLER)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for library, least in _QUIET.items():
        logging.getLogger(library).setLevel(max(least, root.level))
    logging.captureWarnings(True)
    return path


def _remove_handler() -> None:
    """Remove the handler that an earlier `configure` installed."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if h.get_name() == _HANDLER]:
        root.removeHandler(handler)
        if isinstance(handler, logging.FileHandler):
            faulthandler.disable()  # it keeps the file descriptor, which may soon be reused for another file
        handler.close()


def _formatter(is_human: bool, fields: Mapping[str, object]) -> logging.Formatter:
    def with_fields(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**event, **fields}

    last: list[Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if is_human
        else [with_fields, structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=_jsonable)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *_SHARED],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _jsonable(value: object) -> object:
    """Convert a value for JSON: bytes (ids) to hex, enums (states) to their value, others to text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str | int) else value.name
    return str(value)
