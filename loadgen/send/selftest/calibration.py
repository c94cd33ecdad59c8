"""Stores the result of `loadgen selftest` for later runs."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from loadgen.machine import cpu_model, loadgen_version, usable_cores
from loadgen.send.run.priority import Priority

UNMEASURED_RPS = 250.0
"""Request rate assumed for one process without a selftest. A small machine with two cores reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rate at which one process passed the selftest: `rate_rps` streams of `output_tokens` tokens each.

    Each token was in its own message. `priority` is the process's scheduling priority; the other fields
    identify the machine and the software.
    """

    rate_rps: float
    output_tokens: int
    priority: str
    measured_at: str
    cpu: str
    cores: int
    python: str
    loadgen: str

    @property
    def tokens_per_s(self) -> float:
        """Token rate of the measured streams."""
        return self.rate_rps * self.output_tokens

    @property
    def is_of_this_machine(self) -> bool:
        """True if it was measured on this CPU with this version of Python and loadgen."""
        return (self.cpu, self.python, self.loadgen) == (cpu_model(), platform.python_version(), loadgen_version())


def new_calibration(rate_rps: float, output_tokens: int, priority: str, measured_at: str) -> Calibration:
    """Return a calibration for this machine and software."""
    return Calibration(
        rate_rps=rate_rps,
        output_tokens=output_tokens,
        priority=priority,
        measured_at=measured_at,
        cpu=cpu_model(),
        cores=usable_cores(),
        python=platform.python_version(),
        loadgen=loadgen_version(),
    )


def path() -> Path:
    """Return the calibration file in the user's cache directory."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "loadgen" / "selftest.json"


def save(calibration: Calibration) -> Path:
    """Write the calibration and return its file. Raises OSError."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)
    return file


def load(priority: Priority) -> Calibration | None:
    """Return the stored calibration for runs with this priority.

    Returns None if there is none, or if it is from another machine, another version or a higher priority.
    """
    try:
        calibration = Calibration(**json.loads(path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    ranks = [one.value for one in Priority]  # lowest first
    is_sooner = calibration.priority not in ranks[: ranks.index(priority) + 1]
    return calibration if calibration.is_of_this_machine and not is_sooner else None


def processes_for(requests_per_s: float, tokens_per_s: float, calibration: Calibration | None) -> int:
    """Return the number of processes that these rates need."""
    rate_rps = calibration.rate_rps if calibration else UNMEASURED_RPS
    tokens_rps = calibration.tokens_per_s if calibration else UNMEASURED_RPS * 32
    return max(1, -(-int(requests_per_s) // max(1, int(rate_rps))), -(-int(tokens_per_s) // max(1, int(tokens_rps))))


def warning(requests_per_s: float, tokens_per_s: float, processes: int, calibration: Calibration | None) -> str:
    """Return a warning if `processes` may not be enough for these peak rates, else an empty text."""
    rate_rps = processes * (calibration.rate_rps if calibration else UNMEASURED_RPS)
    tokens_rps = processes * (calibration.tokens_per_s if calibration else UNMEASURED_RPS * 32)
    if requests_per_s <= rate_rps and tokens_per_s <= tokens_rps:
        return ""
    known = (
        f"{processes} process{'es are' if processes > 1 else ' is'} accurate up to {rate_rps:g} requests/s and "
        f"{tokens_rps:g} tokens/s on this machine (loadgen selftest, priority {calibration.priority})"
        if calibration
        else f"only {rate_rps:g} requests/s and {tokens_rps:g} tokens/s are assumed until `loadgen selftest` has "
        "run on this machine"
    )
    asked = f"the plan needs up to {requests_per_s:.0f} requests/s and {tokens_per_s:.0f} tokens/s"
    return f"{asked}; {known}. The measured send lag decides whether the run is valid; --processes N spreads the work"
