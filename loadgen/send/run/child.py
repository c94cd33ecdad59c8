"""One process that sends its share of a plan. It is told what to do by JSON lines on its standard input, and
answers so on its output:

in   {"job": …}                  what to send to whom (`ChildJob`)
out  {"ready": {…}}              everything that can be done before the start has been
in   {"start_s": 123.4}          begin at that time of the machine's clock
out  {"counts": {…}}             every so often
in   {"stop": true}              send nothing more; the end of the input means that, too
out  {"done": {…}}               all has ended, and every record is written
out  {"problem": "…"}            instead of any of these; in words for a user
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
from loadgen.measure.request_metrics import Terms
from loadgen.plan.plan import Plan, PlannedRequest
from loadgen.plan.plan_file import read_plan
from loadgen.plan.schedule import share
from loadgen.send.client import Client, ask_once
from loadgen.send.prompts import Prompts, new_prompts
from loadgen.send.run.priority import Priority, raise_priority
from loadgen.send.run.runner import Runner
from loadgen.send.target import Target, new_client, raise_file_limit
from loadgen.slo_target import SloTarget

REPORT_S = 0.25
WARM_UPS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildJob:
    """`slos` are promised instead of the plan's. `core`: the only one that this process may run on.
    `priority`: while it sends."""

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

    def terms(self, plan: Plan) -> Terms:
        """What its answers are held against."""
        return self.target.terms(plan)


async def serve(job: ChildJob, parent: Parent) -> None:
    """Raises LoadgenError."""
    max_connections = raise_file_limit()
    plan = replace(read_plan(job.plan), slos=job.slos)
    requests = share(plan.requests, job.part, job.parts)
    client = new_client(job.target, max_connections)
    try:
        await client.open()
        prompts = new_prompts(plan, job.target)
        with RecordWriter(Path(job.records)) as writer:
            runner = Runner(
                plan, requests, client, prompts, writer, terms=job.terms(plan), timeout_s=job.target.timeout_s
            )
            warmed = await warm_up(job, requests, client, prompts)
            runner.prepare()
            priority = raise_priority(Priority(job.priority))
            parent.tell(
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
        parent.tell({"done": runner.counts.to_json()})
    finally:
        await client.aclose()


async def _run(runner: Runner, start_s: float, parent: Parent) -> None:
    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            parent.tell({"counts": runner.counts.to_json()})

    parent.on_stop(runner.stop)
    reporter = asyncio.create_task(report())
    try:
        await runner.run(start_s)
    finally:
        reporter.cancel()


MAX_ERROR = 2000
"""Characters: the parent reads a line of limited length."""


async def warm_up(job: ChildJob, requests: list[PlannedRequest], client: Client, prompts: Prompts) -> dict[str, Any]:
    """This process's part of the warm-ups: their number, how many failed, and the first one's error."""
    numbers = list(range(job.part, job.warm_ups, job.parts)) if requests else []
    errors: list[str] = []
    gate = asyncio.Semaphore(WARM_UPS_AT_ONCE)

    async def one(number: int) -> None:
        request = requests[number // job.parts % len(requests)]
        async with gate:
            exchange = await ask_once(client, prompts.warm_up(number, request), job.target.timeout_s)
            if not exchange.is_whole:
                status = f"{exchange.status}: " if exchange.status not in (None, 200) else ""
                errors.append(status + (exchange.error or "the answer was cut short"))

    await asyncio.gather(*map(one, numbers))
    return {"warm_ups": len(numbers), "warm_ups_failed": len(errors), "warm_up_error": "".join(errors[:1])[:MAX_ERROR]}


class Parent:
    """The process that started this one, at the other end of the standard streams."""

    def __init__(self, reader: asyncio.StreamReader, output: int) -> None:
        self._reader = reader
        self._output = output
        self._start: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._stop: Any = None
        self._is_stopped = False
        self._listener: asyncio.Task[None] | None = None

    async def job(self) -> ChildJob:
        line = await self._reader.readline()
        job = ChildJob.from_json(json.loads(line)["job"])
        self._listener = asyncio.create_task(self._listen())
        return job

    async def start(self) -> float | None:
        """When to begin; None: not at all."""
        return await self._start

    def on_stop(self, stop: Any) -> None:
        self._stop = stop
        if self._is_stopped:
            stop()

    def tell(self, message: Mapping[str, Any]) -> None:
        """A line, in one write. The parent reads all the time; one that is gone has closed our input, too."""
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
        parent.tell({"problem": str(error)})
        return 2
    return 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    import uvloop

    return uvloop.run(_main())


if __name__ == "__main__":
    sys.exit(main())
