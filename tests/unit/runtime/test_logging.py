import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
import structlog

from baton.runtime import logging as baton_logging
from baton.runtime.logging import configure, get_logger


class Colour(Enum):
    RED = "red"
    PAIR = (1, 2)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    baton_logging._remove_handler()
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(path: Path) -> list[dict[str, object]]:
    """Return the lines of this test. A thread that an earlier test has left behind may log, too."""
    return own_lines(path.read_text())


def own_lines(text: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in text.splitlines()]
    warned = [line for line in found if line["logger"] == "py.warnings" and "old" in str(line["event"])]
    return [line for line in found if line["logger"] in ("baton.test", "uvicorn.error", "httpx") or line in warned]


def test_events_become_json_lines_in_the_process_file(tmp_path: Path) -> None:
    path = configure("worker-w0", log_dir=tmp_path / "logs", worker_id="w0")
    get_logger("baton.test").info("kv_pull_done", request_id=b"\x01\xff", state=Colour.RED, pair=Colour.PAIR, bytes=3)
    assert path == tmp_path / "logs" / "worker-w0.log"
    (line,) = lines(path)
    assert line.pop("time")
    assert line == {
        "event": "kv_pull_done",
        "logger": "baton.test",
        "level": "info",
        "process": "worker-w0",
        "worker_id": "w0",
        "request_id": "01ff",
        "state": "red",
        "pair": "PAIR",
        "bytes": 3,
    }


def test_library_logs_and_warnings_are_in_the_same_file(tmp_path: Path) -> None:
    path = configure("gateway", log_dir=tmp_path)
    assert path is not None
    logging.getLogger("uvicorn.error").warning("listening on %d", 80)
    logging.getLogger("httpx").info("one line a request")
    with warnings.catch_warnings():
        warnings.simplefilter("always", DeprecationWarning)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    first, second = lines(path)
    assert (first["event"], first["logger"], first["level"]) == ("listening on 80", "uvicorn.error", "warning")
    assert "old" in str(second["event"])


def test_exception_is_logged_with_its_traceback(tmp_path: Path) -> None:
    path = configure("x", log_dir=tmp_path)
    assert path is not None
    try:
        raise LookupError("nothing there")
    except LookupError:
        get_logger("baton.test").exception("step_failed")
    (line,) = lines(path)
    assert "LookupError: nothing there" in str(line["exception"])


def test_level_filters_lines_and_context_variables_are_added(tmp_path: Path) -> None:
    path = configure("x", log_dir=tmp_path, level="warning")
    assert path is not None
    log = get_logger("baton.test")
    log.info("below_level")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.warning("at_level")
    (line,) = lines(path)
    assert (line["event"], line["request_id"]) == ("at_level", "r1")


def test_native_crash_writes_its_stack_to_the_log_file(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys; from pathlib import Path; from baton.runtime.logging import configure\n"
        "configure('worker', log_dir=Path(sys.argv[1])); faulthandler._sigsegv()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30, check=False)
    assert done.returncode != 0
    assert "Segmentation fault" in (tmp_path / "worker.log").read_text()


def test_second_configure_call_replaces_the_first(tmp_path: Path) -> None:
    first, second = configure("a", log_dir=tmp_path), configure("b", log_dir=tmp_path)
    assert first is not None
    assert second is not None
    get_logger("baton.test").info("hello")
    assert (len(lines(first)), len(lines(second))) == (0, 1)


def test_stream_gets_json_and_terminal_gets_text() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    assert configure("x", stream=pipe) is None
    get_logger("baton.test").info("hello", n=1)
    (line,) = own_lines(pipe.getvalue())
    assert line["n"] == 1
    configure("x", stream=terminal)
    get_logger("baton.test").info("hello", n=1)
    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
