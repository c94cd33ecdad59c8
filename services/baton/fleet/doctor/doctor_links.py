"""Checks of how KV can move here: two processes are started for each way, and one reads the other's memory,
as a decode worker does."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
PAIR_LIMIT_S = 60.0
CMA_LIMIT_S = 10.0
SLOWER = "NIXL moves KV more slowly without them, and --transfer local does not need them"
LEAVE_S = 5.0
"""Time for a process to end by itself once its standard input has."""
SLOW_TRANSPORTS = ("tcp",)
"""Between two processes of one machine; what UCX falls back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a pair found out; `problem` instead of the others where nothing could be read."""

    transport: str = ""
    bytes_per_s: float = 0.0
    problem: str = ""


class _PairFailed(Exception):
    """One of the two processes said why, or nothing, and ended or was ended."""


def cross_process_reads() -> Iterator[Finding]:
    """Whether UCX can copy directly between two processes (its transport `cma`). Nothing where the system is
    not Linux."""
    if sys.platform != "linux":
        return
    module = "baton.fleet.doctor.doctor_cma"
    try:
        problem = _pair([module, "owner"], [module, "reader"], CMA_LIMIT_S).strip()
    except _PairFailed as error:
        problem = str(error)
    yield cma_finding(problem, YAMA.read_text().strip() if YAMA.exists() else "")


def cma_finding(problem: str, yama: str) -> Finding:
    """`yama`: what ptrace_scope says; empty where the kernel has no such thing."""
    name = "cross-process reads"
    if not problem:
        return ok(name, "allowed (UCX's cma)")
    if yama not in ("", "0"):
        return warn(
            name,
            f"refused: {problem} (ptrace_scope is {yama})",
            f"{SLOWER}; to allow them: sysctl kernel.yama.ptrace_scope=0",
        )
    return warn(name, f"refused: {problem}", f"{SLOWER}; to allow them, give the container the capability SYS_PTRACE")


def transfers() -> Iterator[Finding]:
    """NIXL, which the workers use where nothing else is said, and shared memory."""
    installed = _nixl_version()
    nixl = measure("nixl") if installed else Measured(problem="not installed")
    yield from transfer_findings(installed, nixl, measure("local"))


def transfer_findings(nixl_version: str | None, nixl: Measured, local: Measured) -> Iterator[Finding]:
    """One of the two has to work."""
    bad = fail if nixl.problem and local.problem else warn
    name = "nixl" if nixl_version is None else f"nixl {nixl_version}"
    if nixl_version is None:
        yield bad(name, nixl.problem, "pip install nixl (Linux only), or use --transfer local")
    elif nixl.problem:
        yield bad(
            name, nixl.problem, "use --transfer local; `python -m baton.fleet.doctor.doctor_pair nixl owner` shows more"
        )
    elif any(slow in nixl.transport for slow in SLOW_TRANSPORTS):
        yield warn(
            name,
            _shown(nixl),
            "one machine's processes could share memory: see cross-process reads, and UCX_TLS if you set it",
        )
    else:
        yield ok(name, _shown(nixl))
    if local.problem:
        yield bad("local transfer", local.problem, "--transfer local cannot be used here")
    else:
        yield ok("local transfer", _shown(local))


def measure(way: str) -> Measured:
    """Move KV between two processes by `nixl` or `local`; takes a few seconds, at most `PAIR_LIMIT_S`."""
    module = "baton.fleet.doctor.doctor_pair"
    try:
        answer = _pair([module, way, "owner"], [module, way, "reader"], PAIR_LIMIT_S)
        found = json.loads(answer.splitlines()[-1])
        return Measured(transport=found["transport"], bytes_per_s=found["bytes_per_s"])
    except _PairFailed as error:
        return Measured(problem=str(error))
    except (LookupError, ValueError, TypeError):
        return Measured(problem="the reading process gave no answer that can be read")


def _shown(found: Measured) -> str:
    return f"{found.bytes_per_s / 1e9:.1f} GB/s between two processes over {found.transport or 'an unknown transport'}"


def _nixl_version() -> str | None:
    try:
        return version("nixl")
    except PackageNotFoundError:
        return None


def _pair(owner: Sequence[str], reader: Sequence[str], limit_s: float) -> str:
    """Start modules `owner` and `reader`, give the owner's first line to the reader, and return what that
    prints. Both are gone then.

    Raises _PairFailed with the last line of what the one that failed said.
    """
    owning, reading = _start(owner), _start(reader)  # together: loading a transport takes seconds
    killer = threading.Timer(limit_s, owning.kill)
    killer.start()
    try:
        assert owning.stdout is not None
        line = owning.stdout.readline()
        if not line.strip():
            raise _PairFailed(_last_line(_end(owning)) or "the owning process said nothing")
        try:
            answer, errors = reading.communicate(line, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise _PairFailed(f"no answer within {limit_s:g} s") from None
        if reading.returncode != 0:
            raise _PairFailed(_last_line(errors) or f"the reading process ended with {reading.returncode}")
        return answer
    finally:
        killer.cancel()
        _end(owning)
        _end(reading)


def _end(process: subprocess.Popen[str]) -> str:
    """Close standard input, which ends either; kill what does not end. Returns what is left of its standard
    error."""
    if process.returncode is not None:
        return ""
    try:
        return process.communicate(timeout=LEAVE_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1]


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
