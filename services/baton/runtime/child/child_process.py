"""Runs a Python function in a child process that may crash or hang, with a deadline and bounded output."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

from baton.runtime.process.process import python_module, with_parent_death_signal

CHILD_MODULE = "baton.runtime.child.child_main"
MAX_ANSWER_BYTES = 1 << 20
"""Bytes of a child's answers that are kept, the first ones."""
MAX_ERROR_BYTES = 8192
"""Bytes of a child's standard error that are kept, the last ones."""
MAX_LAST_LINES = 12
KILL_WAIT_S = 10.0
"""Time that a killed child gets to disappear. A process inside a hanging driver call cannot be ended."""
NOT_STARTED_CODE = 127
"""Exit code of a child that could not be started, as shells give it."""
_CHUNK_BYTES = 1 << 16


class ChildStop(Enum):
    """The end of a child: by itself, by a signal, or by its deadline."""

    EXITED = "exited"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnd:
    """The end of a child process.

    code: the exit code, or the negative number of the signal.
    answers: the objects that it has reported, in order.
    last_lines: of its standard error.
    """

    stop: ChildStop
    code: int
    answers: tuple[Mapping[str, Any], ...] = ()
    last_lines: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Say how it ended, with its last lines."""
        lines = "; its last lines: " + " | ".join(self.last_lines) if self.last_lines else ""
        if self.stop is ChildStop.TIMED_OUT:
            return f"the child process did not end in time{lines}"
        if self.stop is ChildStop.CRASHED:
            return f"the child process was ended by {_signal_name(-self.code)}{lines}"
        return f"the child process exited with code {self.code}{lines}"


def run_child(function: str, payload: Mapping[str, Any], deadline_s: float) -> ChildEnd:
    """Call `function(payload, report)` in a new interpreter and return how that ended.

    function: `package.module:name`. payload: anything that JSON can hold. report: takes one mapping; what it
    was given before a crash is in `ChildEnd.answers`.

    A child that cannot be started, for lack of memory or because its payload has more than 100 KiB, exits
    with `NOT_STARTED_CODE`. The child has no standard input and leads a process group, which is killed at the
    deadline, so that its own children end, too. It also ends by itself soon after the deadline, if this
    process is gone by then.
    """
    command = with_parent_death_signal([*python_module(CHILD_MODULE), function, json.dumps(payload), f"{deadline_s:g}"])
    ends_s = time.monotonic() + deadline_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return ChildEnd(stop=ChildStop.EXITED, code=NOT_STARTED_CODE, last_lines=(f"it was not started: {error}",))
    answers, errors = _Reader(process.stdout, MAX_ANSWER_BYTES, keeps_last=False), _Reader(process.stderr)
    is_late = False
    try:
        process.wait(max(0.0, ends_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        _kill_group(process)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    stop = ChildStop.TIMED_OUT if is_late else ChildStop.CRASHED if code < 0 else ChildStop.EXITED
    return ChildEnd(
        stop=stop,
        code=code,
        answers=tuple(_answers(answers.text().splitlines())),
        last_lines=last_lines(errors.text().splitlines()),
    )


def run_program(command: Sequence[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a program and return its exit code and output. At the deadline, its own children are killed, too.

    subprocess.run would leave those behind: a compiler's driver is only the parent of the compiler. Raises
    OSError if it cannot be started, subprocess.TimeoutExpired at the deadline.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        _kill_group(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def last_lines(lines: Sequence[str], most: int = MAX_LAST_LINES) -> tuple[str, ...]:
    """Return the last lines that are not empty, without blanks at their ends."""
    return tuple(stripped for line in lines if (stripped := line.strip()))[-most:]


class _Reader:
    """Reads a pipe to its end in a thread, and keeps a bounded part of it, so that the child never waits."""

    def __init__(self, pipe: IO[bytes] | None, most: int = MAX_ERROR_BYTES, *, keeps_last: bool = True) -> None:
        assert pipe is not None
        self._pipe, self._most, self._keeps_last = pipe, most, keeps_last
        self._kept = b""
        self._thread = threading.Thread(target=self._read, name="child-output", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return what was kept. Call it after the child has ended."""
        self._thread.join(KILL_WAIT_S)  # a process that has left the group may still hold the pipe
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        with self._pipe, suppress(OSError, ValueError):
            while chunk := os.read(self._pipe.fileno(), _CHUNK_BYTES):
                joined = self._kept + chunk
                self._kept = joined[-self._most :] if self._keeps_last else joined[: self._most]


def _kill_group(process: "subprocess.Popen[Any]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _answers(lines: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    """Yield the answers that are complete."""
    for line in lines:
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                yield answer


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
