"""Starts and stops a server by a command of the user, such as `baton up --prefill {p} --http-port {port}`.

The command is not run in a shell; write `sh -c '…'` for one. The server runs in its own session, so Ctrl-C in
the terminal reaches only loadgen, which then stops the server's process group with SIGINT, SIGTERM and
SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import string
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen.loadgen_errors import LoadgenError, Unreachable
from loadgen.send.server.discover import discover_grpc, ready_status
from loadgen.send.timers import now_s

PORT = "port"
READY_POLL_S, EXIT_POLL_S = 0.25, 0.05
"""Intervals of the checks whether a server is ready, and whether it has exited."""
STOP_SIGNALS = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
"""Signals for the process group, with the time it has to exit after each."""
ORPHANS_S = 5.0
"""Shorter limit once the group's leader has exited, because unreaped zombie processes look alive."""
READY_PATHS = ("/ready", "/health", "/v1/models")
"""Readiness paths in order. The first one that does not return 404 decides."""
_LOG_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """Values of a sweep's placeholders. Empty if nothing is swept."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """The values in text form, `p=1,d=2`."""
        return ",".join(f"{name}={value}" for name, value in self.values.items())


def parse_sweep(text: str) -> list[SweepPoint]:
    """Return the points of a sweep such as `p:d=1:1,1:2,2:1`, for the placeholders {p} and {d}. Raises
    LoadgenError."""
    names, equals, rest = text.partition("=")
    keys = [name.strip() for name in names.split(":")]
    if (
        not equals
        or not rest.strip()
        or not all(key.isidentifier() and key != PORT for key in keys)
        or len(set(keys)) < len(keys)
    ):
        raise LoadgenError(f"`{text}` is not a sweep; write names and values, such as p:d=1:1,1:2,2:1")
    points = []
    for part in rest.split(","):
        values = [value.strip() for value in part.split(":")]
        if len(values) != len(keys) or not all(values):
            raise LoadgenError(f"`{text}`: `{part}` must have one value for each of {', '.join(keys)}")
        points.append(SweepPoint(values=dict(zip(keys, values, strict=True))))
    if len({point.name for point in points}) < len(points):
        raise LoadgenError(f"`{text}` contains a point twice; remove one")
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A command's arguments with {placeholders}."""

    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, points: Sequence[SweepPoint]) -> ServerCommand:
        """Split a command and check that the points fill all placeholders and have no unused value.

        Raises LoadgenError.
        """
        try:
            arguments = tuple(shlex.split(text))
            asked = {
                name for argument in arguments for _, name, *_ in string.Formatter().parse(argument) if name is not None
            }
        except ValueError as error:
            raise LoadgenError(f"--command `{text}`: {error}; write {{{{ for a literal brace") from None
        if not arguments:
            raise LoadgenError("--command is empty")
        given = {name for point in points for name in point.values}
        if asked - given - {PORT}:
            missing = sorted(asked - given - {PORT})[0]
            raise LoadgenError(
                f"--command contains {{{missing}}}, but --sweep has no value for it; {{port}} is the only "
                "built-in placeholder"
            )
        if given - asked:
            raise LoadgenError(
                f"--sweep has values for {sorted(given - asked)[0]}, but --command does not contain "
                f"{{{sorted(given - asked)[0]}}}"
            )
        return cls(arguments=arguments)

    @property
    def has_port(self) -> bool:
        """True if the command contains {port}."""
        return any("{" + PORT + "}" in argument for argument in self.arguments)

    def at(self, point: SweepPoint, port: int) -> list[str]:
        """Return the arguments for a point and a port."""
        return [argument.format(**point.values, **{PORT: port}) for argument in self.arguments]


def free_port() -> int:
    """Return a free TCP port on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


Probe = Callable[[], int | None]
"""Returns the HTTP status of a readiness check, or None if no server listens.

Raises LoadgenError for errors that waiting does not solve, such as an untrusted certificate.
"""


def http_probe(url: str, headers: Mapping[str, str], *, is_insecure: bool) -> Probe:
    """Return a probe over HTTP that tries `READY_PATHS`."""

    def probe() -> int | None:
        try:
            for path in READY_PATHS:
                status = ready_status(url, path, headers, is_insecure=is_insecure)
                if status != 404:
                    return status
        except Unreachable:
            return None
        return 404

    return probe


def grpc_probe(url: str, headers: Mapping[str, str], *, is_insecure: bool) -> Probe:
    """Return a probe over Baton's gRPC API."""

    def probe() -> int | None:
        try:
            discover_grpc(url, headers, is_insecure=is_insecure)
        except Unreachable:
            return None
        return 200

    return probe


@contextmanager
def running_server(
    arguments: Sequence[str],
    probe: Probe,
    log: Path,
    *,
    ready_s: float,
    stop_signals: Sequence[tuple[signal.Signals, float]] = STOP_SIGNALS,
) -> Iterator[None]:
    """Run the server while entered. It is ready on entry, and its process group is stopped on exit.

    Output goes to `log`. Raises LoadgenError if it is not ready in time, or if another server already
    answers.
    """
    if probe() is not None:
        raise LoadgenError(
            "another server already answers at this address; stop it, or use {port} in --command for a free port"
        )
    signals = stop_signals[
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN :
    ]  # children inherit an ignored SIGINT, for example under nohup
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LoadgenError(f"`{shlex.join(arguments)}` cannot be started: {error.strerror or error}") from error
        try:
            _wait_until_ready(process, probe, log, ready_s)
            yield
        finally:
            _stop(process, signals)


def _wait_until_ready(process: subprocess.Popen[bytes], probe: Probe, log: Path, ready_s: float) -> None:
    end_s = now_s() + ready_s
    while probe() != 200:
        if process.poll() is not None:
            raise LoadgenError(
                f"the server exited with code {process.returncode} before it was ready; {_log_tail(log)}"
            )
        if now_s() > end_s:
            raise LoadgenError(f"the server was not ready within {ready_s:g} s; {_log_tail(log)}")
        time.sleep(READY_POLL_S)


def _stop(process: subprocess.Popen[bytes], signals: Sequence[tuple[signal.Signals, float]]) -> None:
    """Stop the process group with one signal after the other.

    A Ctrl-C meanwhile skips to the next signal and is raised again at the end.
    """
    was_interrupted = False
    for number, patience_s in signals:
        if not _signal_group(process.pid, number):
            break
        try:
            if _is_gone(process, patience_s):
                break
        except KeyboardInterrupt:
            was_interrupted = True
    process.poll()
    if was_interrupted:
        raise KeyboardInterrupt


def _is_gone(process: subprocess.Popen[bytes], within_s: float) -> bool:
    end_s = now_s() + within_s
    orphans_end_s = None
    while (is_led := process.poll() is None) or _signal_group(process.pid, 0):
        if not is_led:
            orphans_end_s = orphans_end_s or now_s() + ORPHANS_S
        if now_s() > min(end_s, orphans_end_s or end_s):
            return False
        time.sleep(EXIT_POLL_S)
    return True


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to the group. Returns False if the group no longer exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


def _log_tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"its last output ({log}):\n{text}" if text else f"it printed nothing ({log})"
