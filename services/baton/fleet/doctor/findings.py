"""`baton doctor`: runs all checks of this machine and collects their findings. The CLI only prints them."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from baton.fleet.doctor import doctor_gpu, doctor_links, doctor_machine, doctor_software
from baton.fleet.doctor.doctor_check import Check, CheckStatus, Finding, warn

CHECKS: Mapping[str, Check] = {
    "python": doctor_software.python,
    "cpu": doctor_machine.cpu,
    "cores": doctor_machine.cores,
    "memory": doctor_machine.memory,
    "/dev/shm": doctor_machine.shared_memory,
    "open files": doctor_machine.open_files,
    "gpu": doctor_machine.gpu,
    "pytorch": doctor_software.pytorch,
    "compiler": doctor_software.compiler,
    "redis": doctor_software.redis,
    "ray": doctor_software.ray,
    "ports": doctor_software.ports,
    "directories": doctor_software.directories,
    "cross-process reads": doctor_links.cross_process_reads,
    "transfer": doctor_links.transfers,
    "gpu kv": doctor_gpu.gpu_kv,
}
"""All checks by name, in display order. Those in `LINK_CHECKS` start processes and take seconds."""
LINK_CHECKS = ("cross-process reads", "transfer", "gpu kv")


def checks_for(min_link_gbps: float, *, links_only: bool = False) -> Mapping[str, Check]:
    """Return all checks, or those of KV transfers; these require this speed, in gigabits per second."""
    checks: dict[str, Check] = {**CHECKS, "transfer": partial(doctor_links.transfers, min_link_gbps)}
    return {name: checks[name] for name in LINK_CHECKS} if links_only else checks


def findings(checks: Mapping[str, Check] = CHECKS) -> Iterator[Finding]:
    """Run the checks one after the other and yield their findings. A check that raises becomes a warning."""
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:  # an unusual machine must not hide the results of the other checks
            yield warn(name, f"the check failed: {type(error).__name__}: {error}", "please report this as a bug")


def is_missing_something(found: Iterable[Finding]) -> bool:
    """Return True if any finding is FAIL, so that `baton up` cannot run on this machine."""
    return any(finding.verdict is CheckStatus.FAIL for finding in found)
