"""Checks how fast KV moves between two processes of this machine.

Each check starts two processes. One of them reads the memory of the other, as a decode worker reads the KV
blocks of a prefill worker.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.fleet.doctor.doctor_check import Finding, fail, ok, warn
from baton.fleet.doctor.doctor_pair import BACKENDS
from baton.runtime.child.process_pair import ProcessPairFailed, run_pair
from baton.transfer.backends.nixl.pair_transport import UNKNOWN_TRANSPORT

NIXL = "nixl"
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
    """Measure all transfer backends with KV in host memory, and say which one `--transfer auto` would use.

    min_link_gbps: workers with this setting refuse links below so many gigabits per second
    """
    installed = _nixl_version()
    missing = LinkMeasurement(problem="not installed")
    measured = {name: missing if name == NIXL and not installed else measure(name) for name in BACKENDS}
    yield from transfer_findings(installed, measured, min_link_gbps)


def transfer_findings(
    nixl_version: str | None, measured: Mapping[str, LinkMeasurement], min_link_gbps: float = 0.0
) -> Iterator[Finding]:
    """Return one finding for each transfer backend, then one for `auto`.

    measured: by the name of the backend, all of `BACKENDS`
    A failure is FAIL only if all backends fail, and a speed below `min_link_gbps` only if none is faster.
    """
    failed = fail if all(each.problem for each in measured.values()) else warn
    for backend in BACKENDS:
        found = measured[backend]
        name = f"{backend} transfer"
        if backend == NIXL:
            name = NIXL if nixl_version is None else f"{NIXL} {nixl_version}"
        if found.problem:
            yield failed(name, found.problem, _remedy(backend, is_installed=nixl_version is not None))
        elif _is_refused(found, min_link_gbps):
            any_is_fast = any(not each.problem and not _is_refused(each, min_link_gbps) for each in measured.values())
            yield _refused(warn if any_is_fast else fail, name, found, min_link_gbps)
        elif backend == NIXL and any(slow in found.transport for slow in SLOW_TRANSPORTS):
            yield warn(
                name,
                _describe(found),
                "processes of one machine can use shared memory: see cross-process reads, and UCX_TLS if you set it",
            )
        else:
            yield ok(name, _describe(found))
    yield from auto_findings(measured, min_link_gbps)


def auto_findings(measured: Mapping[str, LinkMeasurement], min_link_gbps: float = 0.0) -> Iterator[Finding]:
    """Return the finding about `--transfer auto`: the fastest backend, and the speeds of all.

    There is none if no backend works.
    """
    working = [name for name in BACKENDS if not measured[name].problem]
    if not working:
        return
    chosen = max(working, key=lambda name: measured[name].bytes_per_s)  # the first of equally fast ones, as workers do
    speeds = ", ".join(
        f"{name} failed" if measured[name].problem else f"{name} {measured[name].bytes_per_s / 1e9:.3g} GB/s"
        for name in BACKENDS
    )
    text = f"would use {chosen} between two processes of this machine: {speeds}"
    if _is_refused(measured[chosen], min_link_gbps):
        yield fail("auto transfer", f"{text}; --min-link-gbps is {min_link_gbps:g}", "lower --min-link-gbps")
    else:
        yield ok("auto transfer", text)


def measure(backend: str) -> LinkMeasurement:
    """Read KV from another process through `backend`, one of `BACKENDS`.

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


def _refused(
    found: Callable[[str, str, str], Finding], name: str, measured: LinkMeasurement, min_link_gbps: float
) -> Finding:
    gbps = measured.bytes_per_s * 8 / 1e9
    return found(
        name,
        f"{_describe(measured)}: {gbps:.3g} Gbit/s, but --min-link-gbps is {min_link_gbps:g}",
        "workers with this setting refuse the link; lower --min-link-gbps, or use another --transfer",
    )


def _remedy(backend: str, *, is_installed: bool) -> str:
    if backend == NIXL and not is_installed:
        return "pip install nixl (Linux only), or use --transfer local or collective"
    details = f"For details, run `python -m baton.fleet.doctor.doctor_pair {backend} owner`"
    return f"use another --transfer. {details}"


def _describe(measured: LinkMeasurement) -> str:
    known = measured.transport not in ("", UNKNOWN_TRANSPORT)
    transport = measured.transport if known else "an unknown transport"
    return f"{measured.bytes_per_s / 1e9:.1f} GB/s between two processes over {transport}"


def _nixl_version() -> str | None:
    try:
        return version("nixl")
    except PackageNotFoundError:
        return None
