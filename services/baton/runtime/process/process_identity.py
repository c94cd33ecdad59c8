"""Identifies a process by its machine, pid and start time, so that a reused pid is not taken for it."""

import os
import socket
import sys
from pathlib import Path

PROC = Path("/proc")


def process_identity(pid: int, *, proc: Path = PROC) -> str:
    """Return `HOST/BOOT/PID_NAMESPACE/START` of a living process of this machine, or "" if there is none."""
    start = _start(pid, proc)
    return "/".join((*_machine(proc), start)) if start else ""


def is_gone(pid: int, identity: str, *, proc: Path = PROC) -> bool:
    """Return True if the process with this identity has ended.

    A process of another machine, or of another container, cannot be seen from here: it counts as running.
    """
    host, boot, namespace, _ = (*identity.split("/"), "", "", "", "")[:4]
    here = _machine(proc)
    if host != here[0]:
        return False
    if boot != here[1]:  # this machine has been restarted since
        return True
    return namespace == here[2] and process_identity(pid, proc=proc) != identity


def _machine(proc: Path) -> tuple[str, str, str]:
    """Return host name, boot id and pid namespace. The last two are empty where they do not exist."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(proc / "self/ns/pid")
    except OSError:
        boot = namespace = ""
    return socket.gethostname().replace("/", "_"), boot, namespace


def _start(pid: int, proc: Path) -> str:
    """Return the start time of a process, in a unit of this system; empty if it has ended."""
    if sys.platform == "linux":
        try:
            words = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if words[0] in "ZX" else words[19]  # fields 3, `state`, and 22, `starttime`
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.Error:
        return ""
