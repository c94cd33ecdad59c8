"""Starting and stopping a server by a command of the user's, such as `baton up --prefill {p} --decode {d}
--http-port {port}`.

No shell reads the command (write `sh -c '…'` for one). The server leads a session of its own, so a Ctrl-C in
the terminal reaches loadgen alone, which then stops the server: SIGINT to its process group, SIGTERM after a
while, SIGKILL in the end.
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
from loadgen.send.server.discover import ask_grpc, ready_status
from loadgen.send.timers import now_s

PORT = "port"
POLL_S = 0.25
PATIENCE_S = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
"""How long the process group may take to go after each signal, …"""
ORPHANS_S = 5.0
"""… and how long of that without its leader: dead processes that nobody collects look alive."""
READY_PATHS = ("/ready", "/health", "/v1/models")
"""The first one that the server knows decides; one that is not there answers 404."""
_LOG_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a sweep puts into the command: values by placeholder; none where nothing is swept."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.values.items())


def parse_sweep(text: str) -> list[Point]:
    """`p:d=1:1,1:2,2:1`: the placeholders {p} and {d}, and their values at each point. Raises
    LoadgenError."""
    names, equals, rest = text.partition("=")
    keys = [name.strip() for name in names.split(":")]
    if (
        not equals
        or not rest.strip()
        or not all(key.isidentifier() and key != PORT for key in keys)
        or len(set(keys)) < len(keys)
    ):
        raise LoadgenError(f"`{text}` is no sweep: write names and values, such as p:d=1:1,1:2,2:1")
    points = []
    for part in rest.split(","):
        values = [value.strip() for value in part.split(":")]
        if len(values) != len(keys) or not all(values):
            raise LoadgenError(f"`{text}`: `{part}` does not have a value for each of {', '.join(keys)}")
        points.append(Point(values=dict(zip(keys, values, strict=True))))
    if len({point.name for point in points}) < len(points):
        raise LoadgenError(f"`{text}` has a point twice")
    return points


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """Arguments with {placeholders}."""

    arguments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, points: Sequence[Point]) -> ServerCommand:
        """Checks that the points fill every placeholder, and that none of their values is left unused. Raises
        LoadgenError."""
        try:
            arguments = tuple(shlex.split(text))
            asked = {
                name for argument in arguments for _, name, *_ in string.Formatter().parse(argument) if name is not None
            }
        except ValueError as error:
            raise LoadgenError(f"--command `{text}`: {error}; a brace that is meant is doubled: {{{{") from None
        if not arguments:
            raise LoadgenError("--command is empty")
        given = {name for point in points for name in point.values}
        if asked - given - {PORT}:
            missing = sorted(asked - given - {PORT})[0]
            raise LoadgenError(
                f"--command has {{{missing}}}, which no --sweep gives (and {{port}}, a free one, is always there)"
            )
        if given - asked:
            raise LoadgenError(
                f"--sweep gives {sorted(given - asked)[0]}, but --command has no {{{sorted(given - asked)[0]}}}"
            )
        return cls(arguments=arguments)

    @property
    def has_port(self) -> bool:
        return any("{" + PORT + "}" in argument for argument in self.arguments)

    def at(self, point: Point, port: int) -> list[str]:
        return [argument.format(**point.values, **{PORT: port}) for argument in self.arguments]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


Probe = Callable[[], int | None]
"""What the server answers when it is asked whether it is ready, as an HTTP status; None where nobody listens.
Raises LoadgenError for what no waiting mends, such as a certificate that is not trusted."""


def http_probe(url: str, headers: Mapping[str, str], *, is_insecure: bool) -> Probe:
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
    def probe() -> int | None:
        try:
            ask_grpc(url, headers, is_insecure=is_insecure)
        except Unreachable:
            return None
        return 200

    return probe


@contextmanager
def served(arguments: Sequence[str], probe: Probe, log: Path, *, ready_s: float) -> Iterator[None]:
    """The server runs, and is ready, inside. What it prints goes to `log`. Raises LoadgenError if it is not
    ready in time, or if something else answers already. It is stopped whatever happens, and nothing of its
    process group is left."""
    if probe() is not None:
        raise LoadgenError("something answers there already: end it, or let --command take {port}, which is a free one")
    patience = PATIENCE_S[
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN :
    ]  # what we ignore (under nohup, say) so does who we start
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
            _stop(process, patience)


def _wait_until_ready(process: subprocess.Popen[bytes], probe: Probe, log: Path, ready_s: float) -> None:
    end_s = now_s() + ready_s
    while probe() != 200:
        if process.poll() is not None:
            raise LoadgenError(f"the server ended with code {process.returncode} before it was ready; {_said(log)}")
        if now_s() > end_s:
            raise LoadgenError(f"the server was not ready within {ready_s:g} s; {_said(log)}")
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes], patience: Sequence[tuple[signal.Signals, float]]) -> None:
    """Ends its process group, by one signal after the other. A second Ctrl-C meanwhile makes it harsher at
    once, and does not get lost."""
    was_interrupted = False
    for number, patience_s in patience:
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
        time.sleep(0.05)
    return True


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anybody."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


def _said(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"its last words ({log}):\n{text}" if text else f"it said nothing ({log})"
