"""The workload of a search at any rate: what `loadgen plan` makes of the same arguments, or `loadgen run` of
its few.

Nothing is stretched to look tidy: at another rate arrivals are drawn anew. Only a trace has times of its own,
so its rate is changed by its time scale, and each trial plays another part of it, drawn by its seed.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadgen.capacity.trials import PlanMaker
from loadgen.commands.plan_command import command as plan_command
from loadgen.loadgen_errors import BadPlan, LoadgenError
from loadgen.plan import draws
from loadgen.plan.plan import Plan, Vocabulary
from loadgen.plan.plan_file import read_plan
from loadgen.plan.sharegpt import read_conversations
from loadgen.plan.workloads import first_look

BY_RATE = {"random": "requests", "shared-prefix": "requests", "sessions": "sessions", "sharegpt": "sessions"}
"""What `--rate` counts."""
TRACES = ("mooncake", "azure")
SCALED = "servegen"
OURS = (
    "-o",
    "--out",
    "--seed",
    "--rate",
    "--seconds",
    "--requests",
    "--sessions",
    "--time-scale",
    "--rate-scale",
    "--limit",
)
"""Options of `loadgen plan` that a search sets itself, or that would cut its trials short."""
MANY = 20_000
"""Requests by which the rate of random clients is told to a percent."""


class _Endless:
    def max_rps(self, seconds: float) -> float:
        return math.inf


class FirstLook(_Endless):
    """As `loadgen run --rate` makes it."""

    unit = "requests"

    def __init__(self, input_tokens: int, output_tokens: int, vocabulary: Vocabulary) -> None:
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._vocabulary = vocabulary

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return first_look(
            rate_rps=rate_rps,
            seconds=seconds,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            seed=seed,
            vocabulary=self._vocabulary,
        )


class ByRate(_Endless):
    """A source that takes `--rate`."""

    def __init__(self, source: str, arguments: Sequence[str]) -> None:
        self.unit = BY_RATE[source]
        self._arguments = (source, *arguments)

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return _planned(*self._arguments, "--rate", f"{rate_rps:.10g}", "--seconds", f"{seconds}s", "--seed", str(seed))


class ByConversation(ByRate):
    """Recorded conversations, none of which is used twice in a trial."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises BadPlan."""
        super().__init__("sharegpt", arguments)
        context = plan_command.commands["sharegpt"].make_context("sharegpt", list(arguments), resilient_parsing=True)
        file = context.params["file"]
        self._count = math.inf if file is None else len(read_conversations(file).usable)

    def max_rps(self, seconds: float) -> float:
        """At which no more than there are arrive, but by a chance of one in ten thousand: arrivals are a
        Poisson process."""
        return (math.sqrt(self._count + 4) - 2) ** 2 / seconds


class ByTimeScale:
    """A trace. Its own rate is that of all of it."""

    unit = "requests"

    def __init__(self, source: str, arguments: Sequence[str]) -> None:
        """Raises BadPlan."""
        _refuse(arguments, "--start", "each trial plays a part of the trace that is drawn by its seed")
        self._arguments = (source, *arguments)
        times = [request.at_s or 0.0 for request in _planned(*self._arguments).requests]
        self._lasts_s = max(times)
        if len(times) < 2 or not self._lasts_s:
            raise BadPlan(f"{source}: a trace of {len(times)} requests in {self._lasts_s:g} s has no rate")
        self._own_rps = (len(times) - 1) / self._lasts_s

    def max_rps(self, seconds: float) -> float:
        return self._lasts_s * self._own_rps / seconds

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        scale = self._own_rps / rate_rps
        part_s = seconds / scale
        if part_s > self._lasts_s * 1.001:
            raise BadPlan(
                f"at {rate_rps:g} requests/s the trace is over in {self._lasts_s * scale:.1f} s, and a trial takes {seconds:g} s"
            )
        start_s = round(
            float(draws.stream(seed, "part of the trace").random(1)[0]) * max(0.0, self._lasts_s - part_s), 6
        )
        start = ["--start", f"{start_s:.6f}s"] if start_s > 0 else []
        return _planned(
            *self._arguments,
            *start,
            "--seconds",
            f"{part_s:.6f}s",
            "--time-scale",
            f"{scale:.10g}",
            "--seed",
            str(seed),
        )


class ByRateScale(_Endless):
    """ServeGen's clients: all their rates change by one factor."""

    unit = "requests"

    def __init__(self, arguments: Sequence[str], seconds: float) -> None:
        """Raises BadPlan."""
        self._arguments = (SCALED, *arguments)
        scale = 1.0
        for _ in range(2):
            made = self._planned(seconds, 0, scale)
            self._own_rps = len(made.requests) / seconds / scale
            scale *= MANY / len(made.requests)

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return self._planned(seconds, seed, rate_rps / self._own_rps)

    def _planned(self, seconds: float, seed: int, scale: float) -> Plan:
        return _planned(
            *self._arguments, "--seconds", f"{seconds}s", "--rate-scale", f"{scale:.10g}", "--seed", str(seed)
        )


def maker_of(workload: Sequence[str], seconds: float) -> PlanMaker:
    """`workload`: a source of `loadgen plan` and its arguments, less those of rate, time and seed. `seconds`:
    of a trial. Raises LoadgenError, click.UsageError."""
    source, *arguments = workload
    if source not in (*BY_RATE, *TRACES, SCALED):
        raise LoadgenError(
            f"`{source}` is no workload: give one of `loadgen plan`: {', '.join((*BY_RATE, *TRACES, SCALED))}"
        )
    for option in OURS:
        _refuse(arguments, option, "the search sets it for each trial")
    if source == "sharegpt":
        return ByConversation(arguments)
    if source in BY_RATE:
        return ByRate(source, arguments)
    return ByTimeScale(source, arguments) if source in TRACES else ByRateScale(arguments, seconds)


def _refuse(arguments: Sequence[str], option: str, why: str) -> None:
    if any(argument == option or argument.startswith(f"{option}=") for argument in arguments):
        raise LoadgenError(f"{option} has no place in the workload: {why}")


def _planned(*arguments: str) -> Plan:
    """What `loadgen plan` makes of them. Raises BadPlan, click.UsageError."""
    with tempfile.TemporaryDirectory(prefix="loadgen-capacity-") as directory:
        path = Path(directory) / "plan.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            plan_command.main(args=[*arguments, "-o", str(path)], prog_name="loadgen plan", standalone_mode=False)
        if not path.exists():
            raise LoadgenError(f"nothing was planned: see `loadgen plan {arguments[0]} --help`")
        return read_plan(path)
