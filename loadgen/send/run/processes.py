"""The sending processes of a run, controlled by the process that the user started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadgen.loadgen_errors import LoadgenError, WarmUpFailed
from loadgen.measure.counts import Counts
from loadgen.send.run.child import ChildJob
from loadgen.send.timers import now_s

START_DELAY_S = 0.3
"""Time between sending the start time to all processes and the start itself."""
KILL_S = 20.0
"""A process that has not ended this long after a stop is killed."""
_MAX_LINE_BYTES = 1 << 20
_ERROR_BYTES = 2000


StopCondition = Callable[[float], bool]
"""Stop condition, called several times a second with the seconds since the start. True ends the run."""


class Interrupted(LoadgenError):
    """The user interrupted a run twice and did not wait for its end."""


class ProgressView(Protocol):
    """Shows a run's progress to the user."""

    def phase(self, text: str) -> None:
        """Show what is done before and after the run itself."""

    def update(self, counts: Counts, elapsed_s: float) -> None:
        """Show the counts, several times a second. `elapsed_s` is the time since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesResult:
    """Result of a run's processes.

    - `started_s`, `ended_s`: by the machine's clock
    - `is_interrupted`: the user ended the run
    - `ended_early`: the stop condition ended the run
    - `problems`: errors of the processes
    - `warm_up_error`: the error of one failed warm-up
    - `priority`: the scheduling priority that was granted
    """

    counts: Counts
    started_s: float
    ended_s: float
    is_interrupted: bool
    problems: tuple[str, ...]
    warm_ups: int
    warm_ups_failed: int
    warm_up_error: str
    max_connections: int
    priority: str
    ended_early: bool = False


async def run_jobs(
    jobs: Sequence[ChildJob], view: ProgressView, enough: StopCondition = lambda _: False
) -> ProcessesResult:
    """Run one process for each job and return how they ended.

    The first Ctrl-C (or SIGTERM) ends the run, a second one aborts it. Raises LoadgenError if the run cannot
    begin, NoWarmUp if no warm-up succeeded, Interrupted at the second Ctrl-C.
    """
    async with _Interrupts() as interrupts:
        children = [_Child(job) for job in jobs]
        try:
            for child in children:
                await child.start()
            view.phase("preparing requests" + (" and warming up" if any(job.warm_ups for job in jobs) else ""))
            ready = await interrupts.result_unless_interrupted(asyncio.gather(*(child.ready() for child in children)))
            if ready is None:
                raise Interrupted("interrupted before any request was sent")
            _check_warm_ups(jobs, ready)
            started_s = now_s() + START_DELAY_S
            view.phase("running")
            for child in children:
                child.send({"start_s": started_s})
            ending = asyncio.ensure_future(asyncio.gather(*(child.done() for child in children)))
            is_interrupted, ended_early = await _watch(ending, children, started_s, interrupts, view, enough)
            await ending
        finally:
            await asyncio.gather(*(child.aclose() for child in children))
    return ProcessesResult(
        counts=_total(children),
        started_s=started_s,
        ended_s=now_s(),
        is_interrupted=is_interrupted,
        problems=tuple(child.problem for child in children if child.problem),
        warm_ups=sum(facts["warm_ups"] for facts in ready),
        warm_ups_failed=sum(facts["warm_ups_failed"] for facts in ready),
        warm_up_error=_warm_up_error(ready),
        max_connections=sum(facts["max_connections"] for facts in ready),
        priority=ready[0]["priority"],
        ended_early=ended_early,
    )


async def _watch(
    ending: asyncio.Future[Any],
    children: Sequence[_Child],
    started_s: float,
    interrupts: _Interrupts,
    view: ProgressView,
    enough: StopCondition,
) -> tuple[bool, bool]:
    """Show progress until all processes have ended. Returns (is_interrupted, is_cut)."""
    is_stopping = ended_early = False
    stop_s = 0.0
    while not ending.done():
        await asyncio.wait((ending, interrupts.pending), timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
        view.update(_total(children), max(0.0, now_s() - started_s))
        if interrupts.count > 1:
            raise Interrupted("interrupted twice: only the requests recorded so far are kept")
        ended_early = ended_early or (
            not is_stopping and not ending.done() and now_s() > started_s and enough(now_s() - started_s)
        )
        if not is_stopping and (ended_early or interrupts.count or any(child.problem for child in children)):
            is_stopping, stop_s = True, now_s()
            if interrupts.count:
                view.phase("stopping; results are kept (press Ctrl-C again to abort)")
            for child in children:
                child.send({"stop": True})
        if is_stopping and now_s() - stop_s > KILL_S:
            for child in children:
                child.kill()
        interrupts.rearm()
    return interrupts.count > 0, ended_early


def _total(children: Sequence[_Child]) -> Counts:
    total = Counts()
    for child in children:
        total += child.counts
    return total


def _check_warm_ups(jobs: Sequence[ChildJob], ready: Sequence[Mapping[str, Any]]) -> None:
    num_sent, num_failed = (sum(facts[name] for facts in ready) for name in ("warm_ups", "warm_ups_failed"))
    if num_sent and num_failed == num_sent:
        what = "the warm-up request" if num_sent == 1 else f"all {num_sent} warm-up requests"
        raise WarmUpFailed(
            f"the run was not started: the server did not complete {what} ({_warm_up_error(ready)}); --warmup 0 "
            "skips warm-up"
        )


def _warm_up_error(ready: Sequence[Mapping[str, Any]]) -> str:
    return next((str(facts["warm_up_error"]) for facts in ready if facts["warm_up_error"]), "")


class _Child:
    """The parent's side of one sending process."""

    def __init__(self, job: ChildJob) -> None:
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._errors: asyncio.Task[bytes] | None = None
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.counts = Counts()
        self.problem = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "loadgen.send.run.child"),  # -P: the current directory is not searched
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the parent
        )
        self.send({"job": self._job.to_json()})
        self._reader = asyncio.create_task(self._read())
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(self._process.stderr.read())

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def ready(self) -> dict[str, Any]:
        """Return the process's ready message. Raises LoadgenError if it failed before."""
        return await self._ready

    async def done(self) -> None:
        """Wait until the process has finished or failed."""
        await asyncio.shield(self._done)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def aclose(self) -> None:
        """Kill the process if it still runs, and collect its output."""
        if self._process is None:
            return
        if not self._done.done():
            self.kill()
        await self._process.wait()
        for task in (self._reader, self._errors):
            if task is not None:
                await asyncio.wait((task,))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # mark as retrieved

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._handle(json.loads(line))
        except (ValueError, KeyError):  # invalid output: the process would wait forever for an answer
            self.kill()
        finally:
            code = await self._process.wait()
            if not self._done.done():
                await self._fail_with_exit_code(code)

    def _handle(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            if not self._ready.done():  # an interrupt may have cancelled it
                self._ready.set_result(message["ready"])
        elif "counts" in message:
            self.counts = Counts.from_json(message["counts"])
        elif "done" in message:
            self.counts = Counts.from_json(message["done"])
            self._done.set_result(None)
        elif "problem" in message:
            self._end(message["problem"])

    async def _fail_with_exit_code(self, code: int) -> None:
        stderr_text = (await self._errors if self._errors is not None else b"").decode(errors="replace").strip()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        detail = f": {stderr_text[-_ERROR_BYTES:]}" if stderr_text else ""
        self._end(f"process {self._job.part} of the run {how}{detail}")

    def _end(self, problem: str) -> None:
        self.problem = problem
        if not self._ready.done():
            self._ready.set_exception(LoadgenError(problem))
        if not self._done.done():
            self._done.set_result(None)


class _Interrupts:
    """Counts Ctrl-C and SIGTERM while entered."""

    def __init__(self) -> None:
        self.count = 0
        self.pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> _Interrupts:
        with contextlib.suppress(ValueError, RuntimeError):  # signal handlers need the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)

    def rearm(self) -> None:
        if self.pending.done():
            self.pending = asyncio.get_running_loop().create_future()

    async def result_unless_interrupted(self, work: asyncio.Future[Any]) -> Any:
        """Return the result of `work`, or None if an interrupt came first."""
        await asyncio.wait((work, self.pending), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.wait((work,))
        return None

    def _on_signal(self) -> None:
        self.count += 1
        if not self.pending.done():
            self.pending.set_result(None)
