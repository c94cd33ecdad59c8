"""Runs `loadgen capacity`: one search on each server that is given or started."""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import click

from loadgen.capacity.capacity_file import PointResult, write_capacity
from loadgen.capacity.capacity_search import Limits, Proposal
from loadgen.capacity.search_runner import SearchResult, run_searches
from loadgen.capacity.trials import Goal, PlanMaker, Trial, TrialLength, Trials, trial_seed
from loadgen.capacity.verdicts import scaled
from loadgen.commands.capacity_plans import SimpleWorkload, maker_of
from loadgen.commands.capacity_text import short_trials, trial_line, unreachable_goals
from loadgen.commands.target_options import (
    GRPC_URL,
    HTTP_URL,
    flags_of,
    headers_of,
    processes_of,
    rates_warning,
    server_facts,
    target_of,
)
from loadgen.loadgen_errors import LoadgenError
from loadgen.machine import loadgen_version
from loadgen.measure.request_metrics import OutcomeRules, lag_limit_s
from loadgen.plan.plan import Plan
from loadgen.plan.sources.workloads import DEFAULT_VOCABULARY
from loadgen.send.run.live import LiveView
from loadgen.send.run.priority import Priority
from loadgen.send.run.run_plan import RunSpec
from loadgen.send.server.idle import IdleWatch
from loadgen.send.server.server_process import (
    ServerCommand,
    SweepPoint,
    free_port,
    grpc_probe,
    http_probe,
    parse_sweep,
    running_server,
)
from loadgen.slo_target import SloTarget, override_slos

TRIALS = "trials"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityJob:
    """Everything that one `loadgen capacity` call needs, checked before a server is contacted.

    - `given`: the command's arguments
    - `maker`: makes the plan of a trial at a given rate
    - `plan`: one plan of the workload, used for the facts that all trials share
    - `goals`, `limits`: what to search for, and the bounds of each search
    - `points`: the sweep's points, or one without values
    - `head`: the first part of capacity.json
    """

    given: Mapping[str, Any]
    out: Path
    maker: PlanMaker
    plan: Plan
    goals: tuple[Goal, ...]
    length: TrialLength
    limits: tuple[Limits, ...]
    confidence: float
    points: tuple[SweepPoint, ...]
    command: ServerCommand | None
    seed: int
    head: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CapacityJob:
        """Return the job for the command's arguments and create the result directory.

        Raises LoadgenError or click.UsageError if an argument is wrong.
        """
        if given["sweep"] and not given["template"]:
            raise click.UsageError("--sweep needs --command, which starts the server of each point")
        if len(given["confidence"]) > 1 or len(given["resolution"]) > 1:
            raise click.UsageError("--confidence and --resolution take one number each")
        points = tuple(parse_sweep(given["sweep"])) if given["sweep"] else (SweepPoint(values={}),)
        started = ServerCommand.parse(given["template"], points) if given["template"] else None
        seconds = given["seconds"]
        length = TrialLength(seconds=seconds, requests=given["requests"])
        maker = _maker(given)
        goals = tuple(
            Goal(target=target, slo_scale=scale) for scale in given["slo_scale"] for target in given["attainment"]
        )
        limits = [_limits(given, goal, length, maker) for goal in goals]
        seed = secrets.randbits(32) if given["seed"] is None else given["seed"]
        lowest_rps = min(max(limit.min_rps for limit in limits), *(limit.max_rps for limit in limits))
        plan = maker.make(lowest_rps, length.at(lowest_rps), trial_seed(seed, 0))
        plan = replace(plan, slos=override_slos(plan.slos, given["slos"]))
        _check_scales(plan.slos, goals)
        return cls(
            given=given,
            out=_new_directory(given["out"] or Path(f"loadgen-capacity-{datetime.now():%Y%m%d-%H%M%S}")),
            maker=maker,
            plan=plan,
            goals=goals,
            length=length,
            limits=tuple(limits),
            confidence=given["confidence"][0],
            points=points,
            command=started,
            seed=seed,
            head={
                "version": loadgen_version(),
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "workload": list(given["workload"])
                or ["random", *(f"--{name}-tokens={plan.made_by[name]}" for name in ("input", "output"))],
                "unit": maker.unit,
                "slos": {name: slo.to_json() for name, slo in plan.slos.items()},
                "confidence": given["confidence"][0],
                "resolution": given["resolution"][0],
                "seconds": seconds,
                "requests": length.requests,
                "seed": seed,
                "notes": list(short_trials(plan, length)),
            },
        )

    def run(self) -> list[PointResult]:
        """Search at each point in turn and return the results. An error at one point does not stop the
        others.

        Raises LoadgenError if capacity.json cannot be written.
        """
        if not any(slo.to_json() for slo in self.plan.slos.values()):
            click.secho("warning: no SLO is set (--slo), so every complete response meets it", fg="yellow", err=True)
        for note in self.head["notes"]:
            click.secho(f"warning: {note}", fg="yellow", err=True)
        done: list[PointResult] = []
        with _Terminations() as terminations:
            for point in self.points:
                progress = _Progress(self, point, done)
                error, is_interrupted = "", False
                try:
                    self._search_at(progress, terminations)
                except LoadgenError as raised:
                    error = str(raised)
                except KeyboardInterrupt:
                    is_interrupted = True
                done.append(progress.result(error, is_interrupted=is_interrupted))
                write_capacity(self.out, self.head, done)
                known = done[-1].found
                if known is not None and known.is_interrupted:
                    break
        return done

    def directory_of(self, point: SweepPoint) -> Path:
        """Return the result directory of a point."""
        return self.out / point.name.replace("/", "_") if point.values else self.out

    def _search_at(self, progress: _Progress, terminations: _Terminations) -> None:
        """Run the search of one point. Raises LoadgenError or KeyboardInterrupt."""
        given = dict(self.given)
        point, directory_of = progress.point, self.directory_of(progress.point)
        directory_of.mkdir(exist_ok=True)
        given["label"] = given["label"] or point.name
        with contextlib.ExitStack() as stack:
            if self.command is not None:
                port = free_port()
                default = GRPC_URL if given["protocol"] == "grpc" else HTTP_URL
                fresh = f"{default.rpartition(':')[0]}:{port}" if self.command.has_port else default
                given["urls"] = tuple(url.replace("{port}", str(port)) for url in given["urls"]) or (fresh,)
                progress.arguments = tuple(self.command.at(point, port))
                self.log_progress(f"starting {' '.join(progress.arguments)}")
                stack.enter_context(
                    running_server(
                        progress.arguments, _probe(given), directory_of / "server.log", ready_s=given["ready_within"]
                    )
                )
            target, server = target_of(given)
            for warning in unreachable_goals(self.plan, self.goals, server.max_model_len):
                click.secho(f"warning: {warning}", fg="yellow", err=True)
            progress.facts = {"url": ",".join(target.urls), "model": target.model, "server": dict(server.facts)}
            spec = RunSpec(
                plan=self.plan,
                target=target,
                out=directory_of / TRIALS,
                warm_ups=given["warmup"],
                priority=Priority(given["priority"]),
                server=server_facts(given, server),
                flags=flags_of(given, target, self.plan.slos),
            )
            trials = Trials(
                spec,
                self.maker,
                self.goals,
                IdleWatch(target, self.plan.vocabulary, limit_s=given["drain"]),
                length=self.length,
                seed=self.seed,
                slos_of=lambda plan: replace(plan, slos=override_slos(plan.slos, given["slos"])),
                processes_of=progress.processes_of,
                show=lambda plan: self._view(plan, target.urls),
            )
            progress.found = run_searches(
                self.goals,
                self.limits,
                _Guarded(trials, terminations),
                confidence=self.confidence,
                time_limit_s=given["time_limit"],
                on_update=progress.update,
            )

    def log_progress(self, text: str, *, fg: str | None = None) -> None:
        """Print a progress line on standard error, unless --quiet is set."""
        if not self.given["quiet"]:
            click.secho(text, fg=fg, err=True)

    def _view(self, plan: Plan, urls: tuple[str, ...]) -> LiveView:
        """Return the live view of a trial. Without a terminal it is silent, because each trial prints a line
        anyway."""
        return LiveView(
            name=plan.name,
            url=", ".join(urls),
            num_requests=len(plan.requests),
            planned_s=max((request.at_s or 0.0 for request in plan.requests), default=0.0),
            lag_limit_s=lag_limit_s(OutcomeRules(slos=plan.slos)),
            is_quiet=self.given["quiet"] or not sys.stderr.isatty(),
        )


class _Progress:
    """The state of one point's search. It is written to capacity.json after each trial."""

    def __init__(self, job: CapacityJob, point: SweepPoint, done: list[PointResult]) -> None:
        self.point = point
        self.arguments: tuple[str, ...] = ()
        self.facts: Mapping[str, Any] = {}
        self.found: SearchResult | None = None
        self._is_warned = False
        self._job = job
        self._done = done

    def processes_of(self, plan: Plan) -> int:
        """Return the number of sending processes for a plan. Warns once if they may be too few."""
        given = self._job.given
        priority = Priority(given["priority"])
        processes = processes_of(given["processes"], plan, priority)
        if not self._is_warned and (warning := rates_warning(plan, processes, priority)):
            click.secho(f"warning: {warning}", fg="yellow", err=True)
            self._is_warned = True
        return processes

    def update(self, found: SearchResult) -> None:
        """Record the search's result so far, print its last trial and rewrite capacity.json."""
        self.found = found
        trial = found.trials[-1]
        self._job.log_progress(
            trial_line(trial, self._job.maker.unit, found.goals), fg="red" if trial.invalid else None
        )
        write_capacity(self._job.out, self._job.head, [*self._done, self.result("")])

    def result(self, error: str, *, is_interrupted: bool = False) -> PointResult:
        """Return this point's result, with an error or an interruption if there was one."""
        found = self.found
        if is_interrupted:
            found = replace(found or SearchResult(goals=(), answers=(), trials=()), is_interrupted=True)
        return PointResult(point=self.point, found=found, command=self.arguments, facts=self.facts, error=error)


class _Terminations:
    """Turns SIGTERM into KeyboardInterrupt while entered, so that servers are stopped and results are
    kept."""

    def __enter__(self) -> _Terminations:
        self._before = signal.getsignal(signal.SIGTERM)
        self.again()
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def again(self) -> None:
        """Install the handler again. A run installs its own handlers and removes them."""
        signal.signal(signal.SIGTERM, self._came)

    @staticmethod
    def _came(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


class _Guarded:
    """Implements `TrialRunner`: runs a trial and restores the SIGTERM handler afterwards."""

    def __init__(self, trials: Trials, terminations: _Terminations) -> None:
        self._trials = trials
        self._terminations = terminations

    def run(self, proposal: Proposal, goal: int) -> Trial:
        try:
            return self._trials.run(proposal, goal)
        finally:
            self._terminations.again()


def _maker(given: Mapping[str, Any]) -> PlanMaker:
    """Return the plan maker for the workload arguments. Raises LoadgenError or click.UsageError."""
    simple = [name for name in ("input_tokens", "output_tokens") if given[name] is not None]
    if given["workload"]:
        if simple:
            raise click.UsageError(
                f"--{simple[0].replace('_', '-')} belongs to the WORKLOAD; write it after the workload's name"
            )
        return maker_of(given["workload"], given["seconds"])
    vocabulary = DEFAULT_VOCABULARY
    if given["tokenizer"]:
        from loadgen.plan.vocabulary import vocabulary_of

        vocabulary = vocabulary_of(given["tokenizer"])
    return SimpleWorkload(given["input_tokens"] or 128, given["output_tokens"] or 32, vocabulary)


def _check_scales(slos: Mapping[str, SloTarget], goals: Sequence[Goal]) -> None:
    """Raise BadSlo if the scale of a goal does not fit one of the SLOs."""
    for goal in goals:
        scaled(slos, goal.slo_scale)


def _limits(given: Mapping[str, Any], goal: Goal, length: TrialLength, maker: PlanMaker) -> Limits:
    """Return the bounds of one goal's search. Raises LoadgenError if they leave no rate to try."""
    limits = Limits(
        start_rps=given["start_rate"],
        min_rps=length.min_rps(goal.target),
        max_rps=min(given["max_rate"] or math.inf, maker.max_rps(given["seconds"])),
        resolution=given["resolution"][0],
        max_trials=given["max_trials"],
    )
    if limits.max_rps <= limits.min_rps:
        raise LoadgenError(
            f"trials of this length can judge {goal.target * 100:g} % only from {limits.min_rps:.3g} "
            f"{maker.unit}/s on, but the highest allowed rate is {limits.max_rps:.3g}; "
            "give longer --seconds or more --requests"
        )
    return limits


def _probe(given: Mapping[str, Any]) -> Any:
    url = given["urls"][0]
    probe = grpc_probe if given["protocol"] == "grpc" else http_probe
    return probe(url, headers_of(given), is_insecure=given["insecure"])


def _new_directory(out: Path) -> Path:
    """Create the result directory. Raises LoadgenError if it exists and is not empty."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise LoadgenError(
                f"{out} exists and is not an empty directory; results are never overwritten, give another --out"
            )
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"{out} cannot be created: {error.strerror or error}") from error
    return out
