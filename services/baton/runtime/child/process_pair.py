"""Runs two Python modules, of which one owns something and the other one reads it."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from baton.runtime.process.process import python_module

EXIT_TIMEOUT_S = 5.0
"""Seconds that a process gets to end by itself after its standard input was closed."""


class ProcessPairFailed(Exception):
    """One of the two processes failed or did not answer in time. The message is its last line of output."""


def run_pair(
    owner: Sequence[str], reader: Sequence[str], timeout_s: float, owner_environ: Mapping[str, str] | None = None
) -> str:
    """Run two Python modules, pass the first line of `owner` to `reader`, and return the output of `reader`.

    owner_environ: variables that only `owner` gets, besides those of this process. Both processes have ended
    when this returns, unless the system cannot end one. Raises ProcessPairFailed with the last line that the
    failing process printed.
    """
    with ExitStack() as stack:
        # Started together, because loading a transport takes seconds.
        owning, reading = _start(owner, owner_environ or {}, stack), _start(reader, {}, stack)
        killer = threading.Timer(timeout_s, owning.kill)
        killer.start()
        stack.callback(killer.cancel)
        assert owning.stdout is not None
        line = owning.stdout.readline()
        if not line.strip():
            raise ProcessPairFailed(_last_line(_end(owning)) or "the owning process printed nothing")
        try:
            answer, errors = reading.communicate(line, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessPairFailed(f"no answer within {timeout_s:g} s") from None
        if reading.returncode != 0:
            raise ProcessPairFailed(_last_line(errors) or f"the reading process exited with {reading.returncode}")
        return answer


def _end(process: subprocess.Popen[str]) -> str:
    """End a process by closing its standard input, or kill it. Return its standard error."""
    if process.returncode is not None:
        return ""
    try:
        return process.communicate(timeout=EXIT_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.communicate(timeout=EXIT_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:  # it hangs in a driver's call
        return ""


def _start(arguments: Sequence[str], environ: Mapping[str, str], stack: ExitStack) -> subprocess.Popen[str]:
    """Start a process that `stack` ends. Raises ProcessPairFailed if there is no memory for one."""
    try:
        process = subprocess.Popen(
            [*python_module(arguments[0]), *arguments[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
    except OSError as error:
        raise ProcessPairFailed(f"a process cannot be started: {error}") from error
    stack.callback(_end, process)
    return process


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
