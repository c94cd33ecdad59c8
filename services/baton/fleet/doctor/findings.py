"""`baton doctor`: what this machine has, what it lacks, and what to do about it. The command line only prints
these findings."""

from collections.abc import Iterable, Iterator, Mapping

from baton.fleet.doctor import doctor_links, doctor_machine, doctor_software
from baton.fleet.doctor.doctor_check import CheckStatus, Examine, Finding, warn

CHECKS: Mapping[str, Examine] = {
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
}
"""In the order in which they are shown; the last ones take seconds."""


def findings(checks: Mapping[str, Examine] = CHECKS) -> Iterator[Finding]:
    """One check after the other. A check that fails itself is a finding, too."""
    for name, examine in checks.items():
        try:
            yield from examine()
        except Exception as error:  # whatever a strange machine does to a check, the others still tell
            yield warn(name, f"could not be examined: {type(error).__name__}: {error}", "report this as a bug")


def is_missing_something(found: Iterable[Finding]) -> bool:
    """Whether `baton up` cannot run here."""
    return any(finding.verdict is CheckStatus.FAIL for finding in found)
