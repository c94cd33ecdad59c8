"""Run files: each `baton up` writes its addresses to one, by which other commands of the same user find it.

A file is JSON, readable by its owner only, in the first of the directories of `run_directories` that can be
used. It names its process by pid and start time, so that a file that outlived its process is recognized.
`baton` and `loadgen` both find clusters here.
"""

import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from baton.runtime.process.process_identity import is_gone, process_identity

VARIABLE = "BATON_RUN_DIR"
MAX_BYTES = 64 * 1024
_LOCAL = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCluster:
    """A cluster that one `baton up` of this user serves.

    pid, identity: its process, see `process_identity`.
    started_s: Unix time at which it was ready.
    cluster, model: names of the cluster and of its model.
    url, gateway: HTTP URL and gRPC address (HOST:PORT) of its gateway.
    needs_key: True if clients need an API key.
    ca, name: file of the authority of its certificate (or `system`), and the name in that certificate if it
        is not the host of the addresses; empty for plain text.
    log_dir: directory of its logs, or empty.
    view: URL of its live view, or empty.
    """

    pid: int
    identity: str
    started_s: float
    cluster: str
    model: str
    url: str
    gateway: str
    needs_key: bool = False
    ca: str = ""
    name: str = ""
    log_dir: str = ""
    view: str = ""


class RunFile:
    """The run file of this process. `close` removes it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @property
    def is_written(self) -> bool:
        return self._path is not None

    def close(self) -> None:
        """Remove the file. Can be called twice."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def run_directories(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that may hold run files, the preferred one first.

    There are two, because a variable such as XDG_RUNTIME_DIR may be set in one shell of a user and not in
    another. BATON_RUN_DIR replaces both.
    """
    if given := environ.get(VARIABLE):
        return [Path(given)]
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    runtime = environ.get("XDG_RUNTIME_DIR")
    return [*([Path(runtime) / "baton"] if runtime else []), Path(cache) / "baton" / "run"]


def write_run_file(cluster: RunningCluster, directories: Sequence[Path]) -> RunFile:
    """Write the run file of this process to the first directory that can be used.

    If there is none, nothing is written: the other commands then need the cluster's address.
    """
    for directory in directories:
        with suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(directory):
                continue
            handle, name = tempfile.mkstemp(dir=directory, prefix=".new-")  # with mode 0600
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    json.dump(asdict(cluster), stream)
                path = directory / f"{cluster.pid}-{secrets.token_hex(4)}.json"
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            return RunFile(path)
    return RunFile(None)


def running_clusters(directories: Sequence[Path]) -> list[RunningCluster]:
    """Return the running clusters of this user, newest first. Files of ended processes are removed."""
    found = []
    for directory in directories:
        if not _is_private(directory):
            continue
        with suppress(OSError):
            for file in directory.glob("*.json"):
                if (cluster := _read(file)) is None:
                    continue
                if is_gone(cluster.pid, cluster.identity):
                    file.unlink(missing_ok=True)
                elif cluster.identity == process_identity(cluster.pid):
                    found.append(cluster)
    return sorted(found, key=lambda cluster: (-cluster.started_s, cluster.pid))


def is_same_address(one: str, other: str) -> bool:
    """Return True if two URLs or addresses name the same port, all names of loopback counting as one."""
    return _host_and_port(one) == _host_and_port(other)


def _host_and_port(address: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
    except ValueError:  # a bracket is missing
        return address, None
    try:
        port = parts.port
    except ValueError:
        port = -1  # no port of any cluster
    host = parts.hostname or ""
    return _LOCAL.get(host, host), port or {"http": 80, "https": 443}.get(parts.scheme)


def _read(file: Path) -> RunningCluster | None:
    """Read a run file. Return None if it cannot be read, is of another user, or of an unknown form."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as stream:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                return None
            content = json.loads(stream.read(MAX_BYTES))
        values = {field.name: content[field.name] for field in fields(RunningCluster) if field.name in content}
        cluster = RunningCluster(**values)
        is_valid = all(isinstance(getattr(cluster, field.name), field.type) for field in fields(cluster))  # type: ignore[arg-type]
        return cluster if is_valid else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _is_private(directory: Path) -> bool:
    """Return True if the directory is this user's, and only this user can write to it."""
    try:
        facts = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
