"""What UCX, under NIXL, is told and asked. NIXL exposes neither, so both go through UCX's environment and its
own log."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_READ = "remote memory read by ucp_get"
_HEADER = re.compile(r"(?P<peer>self|intra-node|inter-node) cfg#(?P<config>\d+)")
_ROW = re.compile(r"\|\s*(?P<first>\d+)\.\.(?P<last>\w+)\s*\|(?P<how>[^|]*)\|(?P<config>[^|]*)\|")
_PROBLEM = re.compile(r"\b(ERROR|WARN|FATAL)\b")
_OURS = re.compile(r"/proc/\d+/fd/\d+")
_TAIL = re.compile(r"\|(?P<text>[^|]*)\|\s*$")

_log_fd = -1


def prepare_environment(
    *, loopback_only: bool = False, port_range: str | None = None, log_path: Path | None = None
) -> None:
    """Before NIXL is imported; only the first call in a process counts. What the user has set in the
    environment stays as it is.

    `loopback_only`: UCX listens on 127.0.0.1 and not on every interface. `port_range`: `LOW-HIGH` for its TCP
    listeners. `log_path`: where its log goes; without it, into memory, where the last words of a crash in UCX
    are lost.
    """
    global _log_fd
    if loopback_only and not os.environ.get("UCX_NET_DEVICES"):
        os.environ["UCX_NET_DEVICES"] = "lo"
    if port_range is not None:
        os.environ.setdefault("UCX_TCP_PORT_RANGE", port_range)
    if (
        _OURS.fullmatch(os.environ.get("UCX_LOG_FILE", "")) and _log_fd < 0
    ):  # inherited from a parent that uses UCX as well
        del os.environ["UCX_LOG_FILE"], os.environ["UCX_PROTO_INFO"]
    if (
        _log_fd < 0
        and sys.platform == "linux"
        and "UCX_LOG_FILE" not in os.environ
        and "UCX_PROTO_INFO" not in os.environ
    ):
        # UCX then says which protocol and transport it has chosen for each kind of operation: the only place
        # where it does.
        if log_path is None:
            _log_fd = os.memfd_create("baton-ucx-log", os.MFD_CLOEXEC)
            os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{_log_fd}"
        else:
            _log_fd = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.environ["UCX_LOG_FILE"] = str(log_path)
        os.environ["UCX_PROTO_INFO"] = "y"


class UcxLog:
    """Reads on in what UCX has logged: which transports its reads use, and its warnings."""

    def __init__(self) -> None:
        self._offset = os.fstat(_log_fd).st_size if _log_fd >= 0 else 0
        self._open_table: list[str] = []
        self._problems: list[str] = []
        self._transports: list[str] = []

    def problems(self) -> list[str]:
        """Errors and warnings since the last call."""
        self._scan()
        problems, self._problems = self._problems, []
        return problems

    def read_transports(self) -> list[str]:
        """Transports of the read protocols chosen since the last call, such as `cma` or `tcp`; of the largest
        reads where they differ."""
        self._scan()
        found, self._transports = self._transports, []
        return found

    def _scan(self) -> None:
        for table in self._tables():
            if len(table) >= 2 and _HEADER.search(table[0]) and _READ in table[1]:
                rows = [match for line in table if (match := _ROW.search(f"|{line}|"))]
                if rows:
                    self._transports.append(transport_name(rows[-1]["config"]))

    def _tables(self) -> Iterator[list[str]]:
        for line in self._new_lines():
            match = _TAIL.search(line)
            if _PROBLEM.search(line):
                self._problems.append(line.rsplit("]", 1)[-1].strip())
            text = line[line.index("|") + 1 : line.rindex("|")].strip() if match else ""
            if match and _HEADER.search(text):
                if self._open_table:
                    yield self._open_table
                self._open_table = [text]
            elif match and self._open_table:
                self._open_table.append(text)
        if self._open_table:
            yield self._open_table
            self._open_table = []

    def _new_lines(self) -> list[str]:
        if _log_fd < 0:
            return []
        ctypes.CDLL(None).fflush(None)  # the log is a buffered C stream
        text = b""
        while chunk := os.pread(_log_fd, 1 << 20, self._offset):
            self._offset += len(chunk)
            text += chunk
        return text.decode(errors="replace").splitlines()


def transport_name(config: str) -> str:
    """UCX's `cma/memory` is `cma`, `tcp/eth0` is `tcp`, its InfiniBand and RoCE transports are `rdma`;
    several are joined by `+`."""
    names = []
    for word in re.findall(r"([a-z_0-9]+)/[\w:.-]+", config):
        name = (
            "rdma"
            if word.startswith(("rc", "dc", "ud", "ib", "gdaki", "gga"))
            else "shared-memory"
            if word in _SHARED
            else word
        )
        if name not in names:
            names.append(name)
    return "+".join(names) or config.strip()


_SHARED = frozenset({"posix", "sysv", "xpmem", "knem"})


def open_event_fds() -> dict[int, str]:
    """This process's epoll descriptors and what each watches."""
    found = {}
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}") as info:
                    found[int(name)] = info.read()
        except OSError:
            continue  # closed meanwhile
    return found


def new_event_fds(before: dict[int, str]) -> list[int]:
    """Epoll descriptors opened since, but not UCX's own thread's, which watches the others: those that tell
    when there is work to progress."""
    now = {fd: info for fd, info in open_event_fds().items() if fd not in before}
    watched = {
        fd: {int(line.split()[1]) for line in info.splitlines() if line.startswith("tfd:")} for fd, info in now.items()
    }
    return [fd for fd, targets in watched.items() if not targets & now.keys()]
