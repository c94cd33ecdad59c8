"""One sending process of a run. It exchanges JSON lines with its parent on standard input and output.

in   {"job": …}                  what to send, and where (`ChildJob`)
out  {"ready": {…}}              preparation is complete
in   {"start_s": 123.4}          start at this time of the machine's clock
out  {"counts": {…}}             progress, several times a second
in   {"stop": true}              send nothing more; end of input means the same
out  {"done": {…}}               all requests have ended and every record is written
out  {"problem": "…"}            instead of any of these: an error message for the user
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from loadgen.loadgen_errors import LoadgenError
from loadgen.measure.records_file import RecordWriter
from loadgen.measure.request_metrics import OutcomeRules
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.plan.plan_file import read_plan
from loadgen.plan.schedule import share
from loadgen.send.client import Client, send_once
from loadgen.send.prompts import Prompts, new_prompts
from loadgen.send.run.priority import Priority, raise_priority
from loadgen.send.run.runner import Runner
from loadgen.send.target import Target, new_client, raise_file_limit
from loadgen.slo_target import SloTarget

REPORT_S = 0.25
"""Interval of progress messages, in seconds."""
MAX_CONCURRENT_WARM_UPS = 4
"""Warm-up requests in flight at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildJob:
    """One process's share of a run.

    - `part`, `parts`: this process sends part `part` of `parts` of the plan's requests
    - `slos`: replace the plan's SLOs
    - `core`: the only core that the process may run on, or None
    - `priority`: scheduling priority while it sends
    """

    plan: str
    records: str
    target: Target
    part: int = 0
    parts: int = 1
    warm_ups: int = 0
    slos: Mapping[str, SloTarget] = field(default_factory=dict)
    core: int | None = None
    priority: str = Priority.NORMAL.value

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "target": self.target.to_json(),
            "slos": {name: slo.to_json() for name, slo in self.slos.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        slos = {name: SloTarget.from_json(slo) for name, slo in data["slos"].items()}
        return cls(**{**data, "target": Target.from_json(data["target"]), "slos": slos})

    def rules(self, plan: Plan) -> OutcomeRules:
        """Return the rules for evaluating responses."""
        return self.target.rules(plan)


async def serve(job: ChildJob, parent: Parent) -> None:
    """Prepare, send and record one job. Raises LoadgenError."""
    max_connections = raise_file_limit()
    plan = replace(read_plan(job.plan), slos=job.slos)
    requests = share(plan.requests, job.part, job.parts)
    client = new_client(job.target, max_connections)
    try:
        await client.open()
        prompts = new_prompts(plan, job.target)
        with RecordWriter(Path(job.records)) as writer:
            runner = Runner(
                plan, requests, client, prompts, writer, rules=job.rules(plan), timeout_s=job.target.timeout_s
            )
            warmed = await warm_up(job, requests, client, prompts)
            runner.prepare()
            priority = raise_priority(Priority(job.priority))
            parent.send(
                {
                    "ready": {
                        "requests": len(requests),
                        "max_connections": max_connections,
                        "priority": priority,
                        **warmed,
                    }
                }
            )
            start_s = await parent.start()
            if start_s is not None:
                await _run(runner, start_s, parent)
        parent.send({"done": runner.counts.to_json()})
    finally:
        await client.aclose()


async def _run(runner: Runner, start_s: float, parent: Parent) -> None:
    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            parent.send({"counts": runner.counts.to_json()})

    parent.on_stop(runner.stop)
    reporter = asyncio.create_task(report())
    try:
        await runner.run(start_s)
    finally:
        reporter.cancel()


MAX_ERROR = 2000
"""Longest error text in characters. The parent reads lines of limited length."""


async def warm_up(job: ChildJob, requests: list[PlannedRequest], client: Client, prompts: Prompts) -> dict[str, Any]:
    """Send this process's share of the warm-ups. Returns their number, the failures and the first error."""
    numbers = list(range(job.part, job.warm_ups, job.parts)) if requests else []
    errors: list[str] = []
    gate = asyncio.Semaphore(MAX_CONCURRENT_WARM_UPS)

    async def one(number: int) -> None:
        request = requests[number // job.parts % len(requests)]
        async with gate:
            exchange = await send_once(client, prompts.warm_up(number, request), job.target.timeout_s)
            if not exchange.is_successful:
                status = f"{exchange.status}: " if exchange.status not in (None, 200) else ""
                errors.append(status + (exchange.error or "the response was cut short"))

    await asyncio.gather(*map(one, numbers))
    return {"warm_ups": len(numbers), "warm_ups_failed": len(errors), "warm_up_error": "".join(errors[:1])[:MAX_ERROR]}


class Parent:
    """The parent process at the other end of the standard streams."""

    def __init__(self, reader: asyncio.StreamReader, output: int) -> None:
        self._reader = reader
        self._output = output
        self._start: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._stop: Any = None
        self._is_stopped = False
        self._listener: asyncio.Task[None] | None = None

    async def job(self) -> ChildJob:
        """Read the job and start listening for commands."""
        line = await self._reader.readline()
        job = ChildJob.from_json(json.loads(line)["job"])
        self._listener = asyncio.create_task(self._listen())
        return job

    async def start(self) -> float | None:
        """Wait for the start time. Returns None if the run is stopped before."""
        return await self._start

    def on_stop(self, stop: Any) -> None:
        """Set the function to call when the parent stops the run."""
        self._stop = stop
        if self._is_stopped:
            stop()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message as a line. The parent reads continuously, so a blocking write is short."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._output, json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            if "start_s" in message and not self._start.done():
                self._start.set_result(message["start_s"])
            elif "stop" in message:
                break
        self._is_stopped = True
        if not self._start.done():
            self._start.set_result(None)
        if self._stop is not None:
            self._stop()


async def _main() -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    parent = Parent(reader, sys.stdout.fileno())
    try:
        job = await parent.job()
        if job.core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {job.core})
        await serve(job, parent)
    except LoadgenError as error:
        parent.send({"problem": str(error)})
        return 2
    return 0


def main() -> int:
    """Run one sending process of a run until its job is done. Returns the exit code.

    SIGINT is ignored, because the parent decides when to stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    import uvloop

    return uvloop.run(_main())


if __name__ == "__main__":
    sys.exit(main())
