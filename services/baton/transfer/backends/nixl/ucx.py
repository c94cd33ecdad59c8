"""Configures UCX through its environment, and reads the chosen transports from its log.

NIXL exposes neither.
"""

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
_OWN_LOG = re.compile(r"/proc/\d+/fd/\d+")
_TAIL = re.compile(r"\|(?P<text>[^|]*)\|\s*$")

_log_fd = -1


def prepare_environment(
    *,
    loopback_only: bool = False,
    port_range: str | None = None,
    reads_gpu_memory: bool = False,
    log_path: Path | None = None,
) -> None:
    """Set UCX's environment. Call it before NIXL is imported; only the first call of a process has an effect.

    loopback_only: UCX listens on 127.0.0.1 instead of every interface
    port_range: `LOW-HIGH` for UCX's TCP listeners
    reads_gpu_memory: reads between GPUs without NVLink use `cuda_ipc`. UCX's default is TCP, because some
        systems write faster than they read (openucx/ucx#7566). Newer NIXL sets it, too (ai-dynamo/nixl#2208).
    log_path: file of UCX's log; None: in memory, where the messages of a crash are lost

    Variables that the user has set are not changed.
    """
    global _log_fd
    if loopback_only and not os.environ.get("UCX_NET_DEVICES"):
        os.environ["UCX_NET_DEVICES"] = "lo"
    if port_range is not None:
        os.environ.setdefault("UCX_TCP_PORT_RANGE", port_range)
    if reads_gpu_memory:
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    if _OWN_LOG.fullmatch(os.environ.get("UCX_LOG_FILE", "")) and _log_fd < 0:  # set by a parent process
        del os.environ["UCX_LOG_FILE"], os.environ["UCX_PROTO_INFO"]
    if (
        _log_fd < 0
        and sys.platform == "linux"
        and "UCX_LOG_FILE" not in os.environ
        and "UCX_PROTO_INFO" not in os.environ
    ):
        # With UCX_PROTO_INFO, UCX logs the protocol and transport of each kind of operation. Nothing else
        # shows them.
        if log_path is None:
            _log_fd = os.memfd_create("baton-ucx-log", os.MFD_CLOEXEC)
            os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{_log_fd}"
        else:
            _log_fd = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.environ["UCX_LOG_FILE"] = str(log_path)
        os.environ["UCX_PROTO_INFO"] = "y"


class UcxLog:
    """Parses new lines of UCX's log: transports of reads, errors and warnings."""

    def __init__(self, fd: int | None = None) -> None:
        """`fd`: of the log; None: the log that `prepare_environment` opened, if any."""
        self._fd = _log_fd if fd is None else fd
        self._offset = os.fstat(self._fd).st_size if self._fd >= 0 else 0
        self._open_table: list[str] = []
        self._problems: list[str] = []
        self._transports: list[str] = []

    def problems(self) -> list[str]:
        """Return the errors and warnings since the last call."""
        self._scan()
        problems, self._problems = self._problems, []
        return problems

    def read_transports(self) -> list[str]:
        """Return the transports of the read protocols chosen since the last call, such as `cma` or `tcp`.

        If a protocol uses several transports, it is the one for the largest reads.
        """
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
        if self._fd < 0:
            return []
        ctypes.CDLL(None).fflush(None)  # the log is a buffered C stream
        text = b""
        while chunk := os.pread(self._fd, 1 << 20, self._offset):
            self._offset += len(chunk)
            text += chunk
        return text.decode(errors="replace").splitlines()


def transport_name(config: str) -> str:
    """Return the short name of a UCX transport configuration.

    `cma/memory` is `cma`, `tcp/eth0` is `tcp`, InfiniBand and RoCE transports are `rdma`. Several are joined
    by `+`.
    """
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
    """Return this process's epoll descriptors and their fdinfo text, which lists what each watches."""
    found = {}
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}") as info:
                    found[int(name)] = info.read()
        except OSError:
            continue  # the descriptor was closed meanwhile
    return found


def new_event_fds(before: dict[int, str]) -> list[int]:
    """Return UCX's event descriptors: the epoll descriptors opened since `before`.

    The descriptor of UCX's own thread is left out. It is the one that watches the others.
    """
    now = {fd: info for fd, info in open_event_fds().items() if fd not in before}
    watched = {
        fd: {int(line.split()[1]) for line in info.splitlines() if line.startswith("tfd:")} for fd, info in now.items()
    }
    return [fd for fd, targets in watched.items() if not targets & now.keys()]
