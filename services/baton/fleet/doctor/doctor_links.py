"""Checks how fast KV moves between two processes of this machine.

Each check starts two processes. One of them reads the memory of the other, as a decode worker reads the KV
blocks of a prefill worker.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn
from baton.runtime.child.process_pair import ProcessPairFailed, run_pair
from baton.transfer.backends.nixl.pair_transport import UNKNOWN_TRANSPORT

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
MEASURE_TIMEOUT_S = 60.0
CMA_TIMEOUT_S = 10.0
WITHOUT_CMA = "NIXL moves KV more slowly without cross-process reads; --transfer local does not need them"
SLOW_TRANSPORTS = ("tcp",)
"""Transports that UCX falls back to. They are slow between two processes of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """Result of reading KV from another process.

    transport: name of the transport that was used, for example "cma".
    bytes_per_s: the speed.
    problem: why nothing could be read. Empty on success; the other fields are unset otherwise.
    """

    transport: str = ""
    bytes_per_s: float = 0.0
    problem: str = ""


def cross_process_reads() -> Iterator[Finding]:
    """Check whether UCX can copy directly between two processes (its transport `cma`). Linux only."""
    if sys.platform != "linux":
        return
    module = "baton.fleet.doctor.doctor_cma"
    try:
        problem = run_pair([module, "owner"], [module, "reader"], CMA_TIMEOUT_S).strip()
    except ProcessPairFailed as error:
        problem = str(error)
    yield cma_finding(problem, YAMA.read_text().strip() if YAMA.exists() else "")


def cma_finding(problem: str, yama: str) -> Finding:
    """Return the finding about cross-process reads.

    problem: why the read failed; empty if it succeeded.
    yama: value of the kernel setting `ptrace_scope`; empty if the kernel has no such setting.
    """
    name = "cross-process reads"
    if not problem:
        return ok(name, "allowed (UCX transport cma)")
    if yama not in ("", "0"):
        return warn(
            name,
            f"refused: {problem} (kernel.yama.ptrace_scope is {yama})",
            f"{WITHOUT_CMA}. To allow them: sysctl kernel.yama.ptrace_scope=0",
        )
    return warn(
        name, f"refused: {problem}", f"{WITHOUT_CMA}. To allow them, give the container the capability SYS_PTRACE"
    )


def transfers(min_link_gbps: float = 0.0) -> Iterator[Finding]:
    """Measure both transfer backends: NIXL (the default) and shared memory (`--transfer local`).

    min_link_gbps: workers with this setting refuse links below so many gigabits per second
    """
    installed = _nixl_version()
    nixl = measure("nixl") if installed else LinkMeasurement(problem="not installed")
    yield from transfer_findings(installed, nixl, measure("local"), min_link_gbps)


def transfer_findings(
    nixl_version: str | None, nixl: LinkMeasurement, local: LinkMeasurement, min_link_gbps: float = 0.0
) -> Iterator[Finding]:
    """Return one finding for each transfer backend.

    A failure is FAIL only if both backends fail. A speed below `min_link_gbps` is always FAIL.
    """
    failed = fail if nixl.problem and local.problem else warn
    name = "nixl" if nixl_version is None else f"nixl {nixl_version}"
    if nixl_version is None:
        yield failed(name, nixl.problem, "pip install nixl (Linux only), or use --transfer local")
    elif nixl.problem:
        yield failed(
            name,
            nixl.problem,
            "use --transfer local. For details, run `python -m baton.fleet.doctor.doctor_pair nixl owner`",
        )
    elif _is_refused(nixl, min_link_gbps):
        yield _refused(name, nixl, min_link_gbps)
    elif any(slow in nixl.transport for slow in SLOW_TRANSPORTS):
        yield warn(
            name,
            _describe(nixl),
            "processes of one machine can use shared memory: see cross-process reads, and UCX_TLS if you set it",
        )
    else:
        yield ok(name, _describe(nixl))
    if local.problem:
        yield failed("local transfer", local.problem, "--transfer local cannot be used on this machine")
    elif _is_refused(local, min_link_gbps):
        yield _refused("local transfer", local, min_link_gbps)
    else:
        yield ok("local transfer", _describe(local))


def measure(backend: str) -> LinkMeasurement:
    """Read KV from another process through `backend` ("nixl" or "local").

    Takes a few seconds, at most `MEASURE_TIMEOUT_S`.
    """
    module = "baton.fleet.doctor.doctor_pair"
    try:
        answer = run_pair([module, backend, "owner"], [module, backend, "reader"], MEASURE_TIMEOUT_S)
        measured = json.loads(answer.splitlines()[-1])
        return LinkMeasurement(transport=measured["transport"], bytes_per_s=measured["bytes_per_s"])
    except ProcessPairFailed as error:
        return LinkMeasurement(problem=str(error))
    except (LookupError, ValueError, TypeError):
        return LinkMeasurement(problem="the reading process printed no valid result")


def _is_refused(measured: LinkMeasurement, min_link_gbps: float) -> bool:
    return measured.bytes_per_s * 8 / 1e9 < min_link_gbps


def _refused(name: str, measured: LinkMeasurement, min_link_gbps: float) -> Finding:
    gbps = measured.bytes_per_s * 8 / 1e9
    return fail(
        name,
        f"{_describe(measured)}: {gbps:.3g} Gbit/s, but --min-link-gbps is {min_link_gbps:g}",
        "workers with this setting refuse the link; lower --min-link-gbps, or use the other --transfer",
    )


def _describe(measured: LinkMeasurement) -> str:
    known = measured.transport not in ("", UNKNOWN_TRANSPORT)
    transport = measured.transport if known else "an unknown transport"
    return f"{measured.bytes_per_s / 1e9:.1f} GB/s between two processes over {transport}"


def _nixl_version() -> str | None:
    try:
        return version("nixl")
    except PackageNotFoundError:
        return None
