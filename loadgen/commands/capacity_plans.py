"""Makes the plan of a capacity search at any rate.

Most workloads draw new arrivals for each rate; recorded arrivals are not stretched. A trace is the exception:
its times are scaled, and each trial plays a part of the trace that its seed selects.
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
from loadgen.plan.sources.sharegpt import read_conversations
from loadgen.plan.sources.workloads import simple_plan

BY_RATE = {"random": "requests", "shared-prefix": "requests", "sessions": "sessions", "sharegpt": "sessions"}
"""Sources that take `--rate`, and what the rate counts."""
TRACES = ("mooncake", "azure")
SCALED = "servegen"
RESERVED_OPTIONS = (
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
"""Options of `loadgen plan` that the search sets itself or that would shorten its trials."""
CALIBRATION_REQUESTS = 20_000
"""Requests needed to measure the mean rate of random clients to about one percent."""


class _Unlimited:
    """Base for workloads without an upper rate limit."""

    def max_rps(self, seconds: float) -> float:
        return math.inf


class SimpleWorkload(_Unlimited):
    """Implements `PlanMaker` with the workload of `loadgen run --rate`."""

    unit = "requests"

    def __init__(self, input_tokens: int, output_tokens: int, vocabulary: Vocabulary) -> None:
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._vocabulary = vocabulary

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return simple_plan(
            rate_rps=rate_rps,
            seconds=seconds,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            seed=seed,
            vocabulary=self._vocabulary,
        )


class ByRate(_Unlimited):
    """Implements `PlanMaker` for a source that takes `--rate`."""

    def __init__(self, source: str, arguments: Sequence[str]) -> None:
        self.unit = BY_RATE[source]
        self._arguments = (source, *arguments)

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return _planned(*self._arguments, "--rate", f"{rate_rps:.10g}", "--seconds", f"{seconds}s", "--seed", str(seed))


class ByConversation(ByRate):
    """Implements `PlanMaker` for recorded conversations, each used at most once in a trial."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Count the usable conversations. Raises BadPlan if the file cannot be read."""
        super().__init__("sharegpt", arguments)
        context = plan_command.commands["sharegpt"].make_context("sharegpt", list(arguments), resilient_parsing=True)
        file = context.params["file"]
        self._count = math.inf if file is None else len(read_conversations(file).usable)

    def max_rps(self, seconds: float) -> float:
        """Return the rate at which the conversations suffice with probability 0.9999 (arrivals are
        Poisson)."""
        return (math.sqrt(self._count + 4) - 2) ** 2 / seconds


class ByTimeScale:
    """Implements `PlanMaker` for a trace by scaling its times. The trace's own rate is its mean over all of
    it."""

    unit = "requests"

    def __init__(self, source: str, arguments: Sequence[str]) -> None:
        """Measure the trace's own rate. Raises BadPlan if it has none."""
        _refuse(arguments, "--start", "the seed of each trial selects the part of the trace to play")
        self._arguments = (source, *arguments)
        times = [request.at_s or 0.0 for request in _planned(*self._arguments).requests]
        self._lasts_s = max(times)
        if len(times) < 2 or not self._lasts_s:
            raise BadPlan(
                f"{source}: a trace of {len(times)} requests in {self._lasts_s:g} s has no rate; it needs two "
                "requests at different times"
            )
        self._own_rps = (len(times) - 1) / self._lasts_s

    def max_rps(self, seconds: float) -> float:
        return self._lasts_s * self._own_rps / seconds

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        scale = self._own_rps / rate_rps
        part_s = seconds / scale
        if part_s > self._lasts_s * 1.001:
            raise BadPlan(
                f"at {rate_rps:g} requests/s the trace lasts {self._lasts_s * scale:.1f} s, but a trial lasts "
                f"{seconds:g} s; give shorter --seconds or a lower --max-rate"
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


class ByRateScale(_Unlimited):
    """Implements `PlanMaker` for ServeGen clients by one common factor on their rates."""

    unit = "requests"

    def __init__(self, arguments: Sequence[str], seconds: float) -> None:
        """Measure the workload's own rate over `seconds`. Raises BadPlan."""
        self._arguments = (SCALED, *arguments)
        scale = 1.0
        for _ in range(2):
            made = self._planned(seconds, 0, scale)
            self._own_rps = len(made.requests) / seconds / scale
            scale *= CALIBRATION_REQUESTS / len(made.requests)

    def make(self, rate_rps: float, seconds: float, seed: int) -> Plan:
        return self._planned(seconds, seed, rate_rps / self._own_rps)

    def _planned(self, seconds: float, seed: int, scale: float) -> Plan:
        return _planned(
            *self._arguments, "--seconds", f"{seconds}s", "--rate-scale", f"{scale:.10g}", "--seed", str(seed)
        )


def maker_of(workload: Sequence[str], seconds: float) -> PlanMaker:
    """Return the plan maker of a workload.

    `workload` is a source of `loadgen plan` and its arguments, without rate, time and seed. `seconds` is the
    length of a trial. Raises LoadgenError or click.UsageError.
    """
    source, *arguments = workload
    if source not in (*BY_RATE, *TRACES, SCALED):
        raise LoadgenError(f"`{source}` is not a workload; give one of {', '.join((*BY_RATE, *TRACES, SCALED))}")
    for option in RESERVED_OPTIONS:
        _refuse(arguments, option, "the search sets it for each trial")
    if source == "sharegpt":
        return ByConversation(arguments)
    if source in BY_RATE:
        return ByRate(source, arguments)
    return ByTimeScale(source, arguments) if source in TRACES else ByRateScale(arguments, seconds)


def _refuse(arguments: Sequence[str], option: str, why: str) -> None:
    if any(argument == option or argument.startswith(f"{option}=") for argument in arguments):
        raise LoadgenError(f"{option} is not allowed in the workload: {why}")


def _planned(*arguments: str) -> Plan:
    """Return the plan that `loadgen plan` makes of the arguments. Raises BadPlan or click.UsageError."""
    with tempfile.TemporaryDirectory(prefix="loadgen-capacity-") as directory:
        path = Path(directory) / "plan.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            plan_command.main(args=[*arguments, "-o", str(path)], prog_name="loadgen plan", standalone_mode=False)
        if not path.exists():
            raise LoadgenError(f"`loadgen plan {arguments[0]}` made no plan; see its --help")
        return read_plan(path)
