"""What `loadgen selftest` proved of this machine, kept where `loadgen run` finds it."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from loadgen.machine import cpu_model, loadgen_version, usable_cores
from loadgen.send.run.priority import Priority

UNPROVED_RPS = 250.0
"""Of one process, where no selftest has been run: what two cores of a small machine are held to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One process of that priority kept its timing at `rate_rps` streams of `output_tokens` tokens, each in a
    message of its own."""

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
        return self.rate_rps * self.output_tokens

    @property
    def is_of_this_machine(self) -> bool:
        return (self.cpu, self.python, self.loadgen) == (cpu_model(), platform.python_version(), loadgen_version())


def measured(rate_rps: float, output_tokens: int, priority: str, measured_at: str) -> Calibration:
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
    """In the user's cache directory."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "loadgen" / "selftest.json"


def save(calibration: Calibration) -> Path:
    """Raises OSError."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(calibration), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)
    return file


def load(priority: Priority) -> Calibration | None:
    """For runs of that priority. None if there is none, or it is of another machine or version, or of a
    process that was woken sooner."""
    try:
        calibration = Calibration(**json.loads(path().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    ranks = [one.value for one in Priority]  # from the least on
    is_sooner = calibration.priority not in ranks[: ranks.index(priority) + 1]
    return calibration if calibration.is_of_this_machine and not is_sooner else None


def processes_for(requests_per_s: float, tokens_per_s: float, calibration: Calibration | None) -> int:
    """So many processes keep their timing at these rates, by what is known."""
    rate_rps = calibration.rate_rps if calibration else UNPROVED_RPS
    tokens_rps = calibration.tokens_per_s if calibration else UNPROVED_RPS * 32
    return max(1, -(-int(requests_per_s) // max(1, int(rate_rps))), -(-int(tokens_per_s) // max(1, int(tokens_rps))))


def warning(requests_per_s: float, tokens_per_s: float, processes: int, calibration: Calibration | None) -> str:
    """What a user should know before a run at these peak rates; empty if nothing."""
    rate_rps = processes * (calibration.rate_rps if calibration else UNPROVED_RPS)
    tokens_rps = processes * (calibration.tokens_per_s if calibration else UNPROVED_RPS * 32)
    if requests_per_s <= rate_rps and tokens_per_s <= tokens_rps:
        return ""
    known = (
        f"{processes} process{'es' if processes > 1 else ''} of this machine kept the timing up to {rate_rps:g} requests/s and "
        f"{tokens_rps:g} tokens/s (loadgen selftest, priority {calibration.priority})"
        if calibration
        else f"above {rate_rps:g} requests/s and {tokens_rps:g} tokens/s nothing is taken for granted until `loadgen selftest` was run here"
    )
    asked = f"the plan asks for up to {requests_per_s:.0f} requests/s and {tokens_per_s:.0f} tokens/s"
    return (
        f"{asked}; {known}. The run's own send lag will tell whether it may be trusted; --processes N spreads the work"
    )
