"""The processes of one run, seen from the one that the user started: they begin at one instant and end
together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadgen.loadgen_errors import LoadgenError, NoWarmUp
from loadgen.measure.counts import Counts
from loadgen.send.run.child import ChildJob
from loadgen.send.timers import now_s

HEAD_START_S = 0.3
"""From telling all processes when to begin until they do."""
KILL_S = 20.0
"""A process that was told to stop, and has not after so long, is killed."""
_MAX_LINE_BYTES = 1 << 20
_ERROR_BYTES = 2000


Enough = Callable[[float], bool]
"""Asked some times a second, with the seconds since the start: whether the run may end now."""


class Interrupted(LoadgenError):
    """The user would not wait for the end of an interrupted run."""


class View(Protocol):
    """What a user sees of a run as it goes."""

    def phase(self, text: str) -> None:
        """What is being done, before and after the run itself."""

    def update(self, counts: Counts, elapsed_s: float) -> None:
        """Some times a second. `elapsed_s`: since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended. `started_s`: when it began, by the machine's clock. `is_interrupted`: by the user;
    `is_cut`: because there was enough. `problems`: what befell its processes. `warm_ups`, how many failed,
    and one's error. `priority`: what its processes were given."""

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
    is_cut: bool = False


async def run_jobs(jobs: Sequence[ChildJob], view: View, enough: Enough = lambda _: False) -> Ended:
    """One process for each of `jobs`. The first Ctrl-C (or SIGTERM) ends the run, the second one everything.

    Raises LoadgenError if it cannot begin, NoWarmUp among them, Interrupted at the second Ctrl-C.
    """
    async with _Interrupts() as interrupts:
        children = [_Child(job) for job in jobs]
        try:
            for child in children:
                await child.start()
            view.phase("preparing requests" + (" and warming up" if any(job.warm_ups for job in jobs) else ""))
            ready = await interrupts.first(asyncio.gather(*(child.ready() for child in children)))
            if ready is None:
                raise Interrupted("interrupted before anything was sent")
            _check_warm_ups(jobs, ready)
            started_s = now_s() + HEAD_START_S
            view.phase("running")
            for child in children:
                child.tell({"start_s": started_s})
            ending = asyncio.ensure_future(asyncio.gather(*(child.done() for child in children)))
            is_interrupted, is_cut = await _watch(ending, children, started_s, interrupts, view, enough)
            await ending
        finally:
            await asyncio.gather(*(child.aclose() for child in children))
    return Ended(
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
        is_cut=is_cut,
    )


async def _watch(
    ending: asyncio.Future[Any],
    children: Sequence[_Child],
    started_s: float,
    interrupts: _Interrupts,
    view: View,
    enough: Enough,
) -> tuple[bool, bool]:
    """Until all have ended; whether the user ended it, and whether it was enough."""
    is_told = is_cut = False
    stop_s = 0.0
    while not ending.done():
        await asyncio.wait((ending, interrupts.pending), timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
        view.update(_total(children), max(0.0, now_s() - started_s))
        if interrupts.count > 1:
            raise Interrupted("interrupted twice: what had been recorded is kept, the rest is not")
        is_cut = is_cut or (not is_told and not ending.done() and now_s() > started_s and enough(now_s() - started_s))
        if not is_told and (is_cut or interrupts.count or any(child.problem for child in children)):
            is_told, stop_s = True, now_s()
            if interrupts.count:
                view.phase("stopping; what was measured is kept (once more: stop at once)")
            for child in children:
                child.tell({"stop": True})
        if is_told and now_s() - stop_s > KILL_S:
            for child in children:
                child.kill()
        interrupts.again()
    return interrupts.count > 0, is_cut


def _total(children: Sequence[_Child]) -> Counts:
    total = Counts()
    for child in children:
        total += child.counts
    return total


def _check_warm_ups(jobs: Sequence[ChildJob], ready: Sequence[Mapping[str, Any]]) -> None:
    num_sent, num_failed = (sum(facts[name] for facts in ready) for name in ("warm_ups", "warm_ups_failed"))
    if num_sent and num_failed == num_sent:
        what = "the warm-up request" if num_sent == 1 else f"all {num_sent} warm-up requests"
        raise NoWarmUp(
            f"nothing was measured: the server did not answer {what} ({_warm_up_error(ready)}); `--warmup 0` sends none"
        )


def _warm_up_error(ready: Sequence[Mapping[str, Any]]) -> str:
    return next((str(facts["warm_up_error"]) for facts in ready if facts["warm_up_error"]), "")


class _Child:
    """One process."""

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
            *("-m", "loadgen.send.run.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C in the terminal is for the parent alone
        )
        self.tell({"job": self._job.to_json()})
        self._reader = asyncio.create_task(self._read())
        assert self._process.stderr is not None
        self._errors = asyncio.create_task(self._process.stderr.read())

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def ready(self) -> dict[str, Any]:
        """Raises LoadgenError."""
        return await self._ready

    async def done(self) -> None:
        """Waits for the end, proper or not."""
        await asyncio.shield(self._done)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def aclose(self) -> None:
        """By now it has ended, or is not to go on."""
        if self._process is None:
            return
        if not self._done.done():
            self.kill()
        await self._process.wait()
        for task in (self._reader, self._errors):
            if task is not None:
                await asyncio.wait((task,))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._take(json.loads(line))
        except (ValueError, KeyError):  # it has said what is no message, and would wait for ever to be heard
            self.kill()
        finally:
            code = await self._process.wait()
            if not self._done.done():
                await self._died(code)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            if not self._ready.done():  # the user may have been quicker
                self._ready.set_result(message["ready"])
        elif "counts" in message:
            self.counts = Counts.from_json(message["counts"])
        elif "done" in message:
            self.counts = Counts.from_json(message["done"])
            self._done.set_result(None)
        elif "problem" in message:
            self._end(message["problem"])

    async def _died(self, code: int) -> None:
        said = (await self._errors if self._errors is not None else b"").decode(errors="replace").strip()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        detail = f": {said[-_ERROR_BYTES:]}" if said else ""
        self._end(f"process {self._job.part} of the run {how}{detail}")

    def _end(self, problem: str) -> None:
        self.problem = problem
        if not self._ready.done():
            self._ready.set_exception(LoadgenError(problem))
        if not self._done.done():
            self._done.set_result(None)


class _Interrupts:
    """Counts Ctrl-C and SIGTERM while it is entered."""

    def __init__(self) -> None:
        self.count = 0
        self.pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> _Interrupts:
        with contextlib.suppress(ValueError, RuntimeError):  # only a main thread has signals
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._came)
        return self

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError, RuntimeError):
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)

    def again(self) -> None:
        if self.pending.done():
            self.pending = asyncio.get_running_loop().create_future()

    async def first(self, work: asyncio.Future[Any]) -> Any:
        """The result of `work`, or None if the user was quicker."""
        await asyncio.wait((work, self.pending), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        work.cancel()
        await asyncio.wait((work,))
        return None

    def _came(self) -> None:
        self.count += 1
        if not self.pending.done():
            self.pending.set_result(None)
