"""A `baton up` of one's own for a benchmark, and the machine that it ran on."""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

START_LINES = 200


@contextmanager
def baton_up(*flags: str) -> Iterator[str]:
    """The HTTP address of a fresh cluster, which ends with the block."""
    command = [str(Path(sys.executable).parent / "baton"), "up", "--http-port", "0", "--grpc-port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        seen = ""
        for _ in range(START_LINES):
            line = process.stdout.readline()
            seen += line
            if found := re.match(r"ready (http://\S+)", line):
                break
        else:
            raise SystemExit(f"the cluster did not start:\n{seen}")
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def machine(*packages: str) -> str:
    """Date, hardware, load and versions, for the head of a table."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    load = os.getloadavg()[0]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores of {cpu}, load {load:.1f} at the start; {versions}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
