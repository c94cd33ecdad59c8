"""Runs a plan: creates the result directory, starts the processes and decides whether the run is valid.

`loadgen run`, the selftest and the capacity search all use it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from loadgen import machine
from loadgen.loadgen_errors import LoadgenError
from loadgen.measure import request_metrics
from loadgen.measure.prefix_hits import CacheVerdict, judge_cache
from loadgen.measure.records import Record, RunInfo
from loadgen.measure.records_file import RECORDS, RUN, RecordWriter, part_of, read_records, write_run
from loadgen.measure.request_metrics import NOT_SENT, OutcomeRules, RequestOutcome
from loadgen.plan.plan import Plan
from loadgen.plan.plan_file import plan_hash, write_plan
from loadgen.send.run.child import ChildJob
from loadgen.send.run.priority import Priority
from loadgen.send.run.processes import ProcessesResult, ProgressView, StopCondition, run_jobs
from loadgen.send.target import Target
from loadgen.send.timers import now_s
from loadgen.user_files import open_bytes

PLAN = "plan.jsonl"
UNFINISHED = "the run did not finish: its main process was killed"
MAX_REASON_CHARS = 120
"""Most characters shown of a server's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Specification of a run.

    - `plan`: the plan, with the SLOs that apply
    - `plan_file`: where `plan` was read from; None if it was generated
    - `server`: facts that the server reported about itself
    - `flags`: the effective arguments without secrets
    - `cores`: one core for each process to run on; empty for any
    """

    plan: Plan
    target: Target
    out: Path
    plan_file: Path | None = None
    processes: int = 1
    warm_ups: int = 0
    server: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    cores: Sequence[int] = ()
    priority: Priority = Priority.HIGH


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that has ended, as stored in its directory.

    - `cache`: whether its prefix cache was warm at the start
    - `notes`: remarks that do not make it invalid
    """

    run: RunInfo
    records: Sequence[Record]
    rules: OutcomeRules
    ended: ProcessesResult
    cache: CacheVerdict
    notes: tuple[str, ...] = ()

    @property
    def outcomes(self) -> Counter[RequestOutcome]:
        """Number of the run's requests by outcome (good, late, failed, ...)."""
        return Counter(request_metrics.classify(record, self.rules) for record in self.records)

    @property
    def not_answered(self) -> tuple[str, ...]:
        """One line about refused and failed requests, with the most frequent reason. Empty if there are
        none."""
        reasons = Counter(
            f"{outcome.replace('_', ' ')}: {record.reason or record.error or record.status}"[:MAX_REASON_CHARS]
            for record in self.records
            if (outcome := request_metrics.classify(record, self.rules))
            not in (*request_metrics.COMPLETE, RequestOutcome.CANCELLED)
        )
        total = f"{reasons.total()} of {len(self.records)}"
        return tuple(
            f"{total} requests have no complete response ({count}: {what})" for what, count in reasons.most_common(1)
        )


def run(spec: RunSpec, view: ProgressView, enough: StopCondition = lambda _: False) -> FinishedRun:
    """Run a plan and return the result.

    Raises LoadgenError if nothing could be measured; then no result directory is left behind.
    """
    made = _new_directory(spec.out)
    try:
        kept_hash = _store_plan(spec)
        jobs = _jobs(spec)
        facts = machine.facts()
        started_at = datetime.now(UTC)
        first = _run_of(spec, jobs, kept_hash, facts, started_at)
        write_run(spec.out, first)
        began_s = now_s()
        try:
            ended = asyncio.run(run_jobs(jobs, view, enough))
        finally:
            torn = merge(spec.out, [Path(job.records) for job in jobs])
    except BaseException:
        if not _has_records(spec.out):
            _remove(spec.out, made)
        raise
    records, notes = read_records(spec.out / RECORDS)
    rules = jobs[0].rules(spec.plan)
    first = replace(
        first, started_at=_iso(started_at + timedelta(seconds=ended.started_s - began_s)), notes=(*torn, *_notes(ended))
    )
    finished = FinishedRun(
        run=_verdict(first, ended, records, rules),
        records=records,
        rules=rules,
        ended=ended,
        cache=judge_cache(records, spec.plan),
        notes=(*first.notes, *notes),
    )
    write_run(spec.out, finished.run)
    return finished


def record_files(spec: RunSpec) -> list[Path]:
    """Return the record files that the processes write during the run."""
    return [spec.out / RECORDS] if spec.processes == 1 else [part_of(spec.out, part) for part in range(spec.processes)]


def outcome_line(outcomes: Mapping[RequestOutcome, int], num_offered: int, *, is_valid: bool) -> str:
    """Return a line such as `offered 300 = good 291 + late 5 + …`.

    The outcomes sum to the offered requests.
    """
    found = [
        f"{outcome} {outcomes.get(outcome, 0)}"
        for outcome in RequestOutcome
        if outcomes.get(outcome) or outcome is RequestOutcome.GOOD
    ]
    missing = num_offered - sum(outcomes.values())
    if missing:
        found.append(f"without a record {missing}")
    return f"offered {num_offered} = {' + '.join(found)}" + ("" if is_valid else "   INVALID")


# Result directory.


def _new_directory(out: Path) -> bool:
    """Create the result directory. Returns True if it did not exist. Raises LoadgenError if it is not
    empty."""
    try:
        if out.exists():
            if not out.is_dir() or any(out.iterdir()):
                raise LoadgenError(
                    f"{out} exists and is not an empty directory; results are never overwritten, give another --out"
                )
            return False
        out.mkdir(parents=True)
    except OSError as error:
        raise LoadgenError(f"{out} cannot be created: {error.strerror or error}") from error
    return True


def _store_plan(spec: RunSpec) -> str:
    """Write the plan uncompressed into the result directory and return its hash."""
    stored = spec.out / PLAN
    if spec.plan_file is None:
        return write_plan(spec.plan, stored)
    try:
        with open_bytes(spec.plan_file) as source, stored.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise LoadgenError(f"{stored} cannot be written: {error.strerror or error}") from error
    return plan_hash(stored)


def merge(out: Path, parts: Sequence[Path]) -> tuple[str, ...]:
    """Merge the processes' record files into one, ordered by end time, atomically.

    Returns notes about records that could not be read.
    """
    if len(parts) == 1:
        (out / RECORDS).touch()
        return ()
    records, notes = read_records(*(part for part in parts if part.exists()))
    merged = out / f".{RECORDS}"
    with RecordWriter(merged) as writer:
        for record in sorted(records, key=lambda record: record.ended_s):
            writer.write(record)
    os.replace(merged, out / RECORDS)
    for part in parts:
        part.unlink(missing_ok=True)
    return notes


def _has_records(out: Path) -> bool:
    return any(file.stat().st_size for file in out.glob("records*.jsonl"))


def _remove(out: Path, made: bool) -> None:
    """Remove the files of a run that measured nothing."""
    for name in (PLAN, RUN, RECORDS):
        (out / name).unlink(missing_ok=True)
    if made and not any(out.iterdir()):
        out.rmdir()


# Validity.


def _jobs(spec: RunSpec) -> list[ChildJob]:
    return [
        ChildJob(
            plan=str(spec.out / PLAN),
            records=str(record_files(spec)[part]),
            target=spec.target,
            part=part,
            parts=spec.processes,
            warm_ups=spec.warm_ups,
            slos=spec.plan.slos,
            core=spec.cores[part] if part < len(spec.cores) else None,
            priority=spec.priority.value,
        )
        for part in range(spec.processes)
    ]


def _run_of(
    spec: RunSpec, jobs: Sequence[ChildJob], kept_hash: str, facts: Mapping[str, Any], started_at: datetime
) -> RunInfo:
    """Return the `run.json` content to store until the run has ended."""
    target = spec.target
    return RunInfo(
        plan_hash=kept_hash,
        plan_name=spec.plan.name,
        started_at=_iso(started_at),
        duration_s=0.0,
        url=",".join(target.urls),
        protocol=target.protocol,
        model=target.model,
        num_offered=len(spec.plan.requests),
        slos=spec.plan.slos,
        ignore_eos=jobs[0].rules(spec.plan).ignore_eos,
        flags=spec.flags,
        machine=facts,
        server=spec.server,
        invalid=(UNFINISHED,),
        warmup_requests=spec.warm_ups,
        processes=spec.processes,
        version=machine.loadgen_version(),
    )


def _verdict(run: RunInfo, ended: ProcessesResult, records: Sequence[Record], rules: OutcomeRules) -> RunInfo:
    is_early = ended.is_interrupted or ended.ended_early
    num_offered = ended.counts.due if is_early else run.num_offered
    reasons = list(request_metrics.invalid_reasons(records, rules, num_offered))
    not_sent = [record for record in records if record.error.startswith(NOT_SENT) and not record.left_early]
    if not_sent:
        reasons.append(
            f"this machine could not send {len(not_sent)} requests: {not_sent[0].error.removeprefix(NOT_SENT)}"
        )
    reasons += ended.problems
    return replace(
        run,
        duration_s=max((record.ended_s for record in records), default=0.0),
        num_offered=num_offered,
        machine={
            **run.machine,
            "load_after": machine.load(),
            "priority": ended.priority,
            "max_connections": ended.max_connections,
            "loadgen_cpu_s": round(ended.counts.cpu_s, 3),
        },
        invalid=tuple(reasons),
        interrupted=is_early,
        warmup_requests=ended.warm_ups,
    )


def _notes(ended: ProcessesResult) -> tuple[str, ...]:
    failed = ended.warm_ups_failed
    return (f"{failed} of {ended.warm_ups} warm-up requests failed: {ended.warm_up_error}",) if failed else ()


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
