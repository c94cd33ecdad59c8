"""Supervises one child process: starts it, restarts it with growing delays, and ends it.

A process that dies again and again shortly after its starts *keeps dying*. It is reported once and tried
again, with delays up to a limit. The owner decides how long this may last.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.fleet.processes.restart_policy import SERVICE_LIMIT, CrashLoop, RestartLimit
from baton.runtime.logging import get_logger
from baton.runtime.process.process import python_module, with_parent_death_signal
from baton.runtime.process.process_end import describe_exit

log = get_logger(__name__)

READY = "ready "
"""A service prints this word and its address on standard output once it serves."""
KILL_WAIT_S = 5.0
LAST_OUTPUT_S = 1.0
"""Longest wait for the rest of the output of a process that has ended."""
MAX_OUTPUT_BYTES = 32 * 2**20
"""Size at which the output file of a process begins anew, as of a log file."""


class ServiceFailed(BatonError):
    """A required process did not start, or kept dying. The message contains the end of its output."""


class StartFailed(ServiceFailed):
    """A process did not become ready. `reason` is the message without its name and its output."""

    def __init__(self, name: str, reason: str, output: str) -> None:
        super().__init__(f"{name} {reason}: {output}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """Describes a child process and how to start it.

    name: its name in messages and logs.
    argv: its command line.
    output: file to which its output is appended.
    environ: environment variables in addition to those of this process.
    start_timeout_s: longest time until it is ready.
    wait_until_ready: returns its address once it answers. None for Baton's own services, which print
        `ready ADDRESS`.
    """

    name: str
    argv: Sequence[str]
    output: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    wait_until_ready: Callable[[], Coroutine[Any, Any, str]] | None = None


class Child:
    """One supervised child process.

    It runs in its own session, so that Ctrl-C reaches only this process. On Linux the kernel kills it when
    this process ends.
    """

    def __init__(
        self,
        spec: ChildSpec,
        *,
        limit: RestartLimit = SERVICE_LIMIT,
        on_restart: Callable[[str, int], None] = lambda name, exit_code: None,
        on_failing: Callable[[str, str, str], None] = lambda name, reason, output: None,
        on_recovered: Callable[[str], None] = lambda name: None,
        give_up_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Describe the process without starting it.

        limit: number of failures after which it counts as one that keeps dying, and its restart delays.
        on_restart: called with its name and exit code after each restart, unless it keeps dying.
        on_failing: called with its name, the reason and the end of its output once it keeps dying.
        on_recovered: called with its name once it serves again.
        give_up_s: returns how long it may keep dying before `supervise` raises.
        """
        self.spec = spec
        self.address = ""
        self.restarts = 0
        self._limit = limit
        self._crash_loop = CrashLoop(limit)
        self._on_restart = on_restart
        self._on_failing = on_failing
        self._on_recovered = on_recovered
        self._give_up_s = give_up_s
        self._process: asyncio.subprocess.Process | None = None
        self._copying: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def pid(self) -> int:
        """Process id, 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, None while it runs. Negative: minus the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    def resume(self) -> None:
        """Send SIGCONT to a suspended process, so that it can end."""
        self._signal(signal.SIGCONT)

    async def start(self) -> str:
        """Start the process and return its address once it serves.

        Raises StartFailed with the end of its output.
        """
        self.spec.output.parent.mkdir(parents=True, exist_ok=True)
        self.spec.output.touch()
        self._stop_copying()
        self._process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(self.spec.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.spec.environ},
            start_new_session=True,
        )
        self._copying = [self._start_copying(self._process.stderr)]
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                self.address = await self._ready(self._process)
        except TimeoutError:
            await self._kill()
            output = await self._last_output()
            reason = f"was not ready within {self.spec.start_timeout_s:g} s"
            raise StartFailed(self.spec.name, reason, output) from None
        except BaseException:
            await self._kill()
            raise
        log.info("child_started", child=self.spec.name, pid=self.pid, address=self.address)
        return self.address

    async def supervise(self) -> None:
        """Restart the process whenever it dies, until `stop` is called.

        Raises ServiceFailed once it keeps dying and has done so for `give_up_s`.
        """
        while True:
            code = await self._wait_for_death()
            if self._stopping:
                return
            log.warning("child_died", child=self.spec.name, pid=self.pid, exit_code=code)
            reason = describe_exit(code)
            while True:
                await asyncio.sleep(await self._record_failure(reason))
                if self._stopping:
                    return
                try:
                    await self.start()
                    break
                except (BatonError, OSError) as error:
                    log.warning("child_restart_failed", child=self.spec.name, error=str(error))
                    reason = error.reason if isinstance(error, StartFailed) else f"did not start: {error}"
            self.restarts += 1
            if not self._crash_loop.keeps_dying:
                self._on_restart(self.spec.name, code)

    async def _wait_for_death(self) -> int:
        """Wait until the process has ended and return its exit code.

        Its failures are forgotten once it has served for `stable_s`.
        """
        assert self._process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit.stable_s):
                return await self._process.wait()
        if self._crash_loop.end():
            log.info("child_recovered", child=self.spec.name, pid=self.pid)
            self._on_recovered(self.spec.name)
        return await self._process.wait()

    async def _record_failure(self, reason: str) -> float:
        """Count one failure. Return the seconds until the next start.

        Raises ServiceFailed if the process keeps dying and has done so for `give_up_s`.
        """
        name, now_s = self.spec.name, asyncio.get_running_loop().time()
        was_reported = self._crash_loop.keeps_dying
        wait_s = self._crash_loop.fail(now_s)
        if not self._crash_loop.keeps_dying:
            return wait_s
        output = await self._last_output()
        if self._crash_loop.duration_s(now_s) >= self._give_up_s():
            raise ServiceFailed(f"{name} keeps dying (last: {reason}): {output}")
        log.error("child_crash_looping", child=name, reason=reason, wait_s=wait_s)
        if not was_reported:
            self._on_failing(name, reason, output)
        return wait_s

    async def stop(self, grace_s: float) -> None:
        """End the process with SIGTERM, then with SIGKILL after `grace_s`. Can be called twice.

        Raises ServiceFailed if the process does not end.
        """
        self._stopping = True
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self._kill()
        finally:
            self._stop_copying()
            await asyncio.gather(*self._copying, return_exceptions=True)

    async def _kill(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            raise ServiceFailed(
                f"{self.spec.name} (pid {self.pid}) did not end within {KILL_WAIT_S:g} s of SIGKILL"
            ) from None

    def _signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended.

        The methods of asyncio's process first ask the kernel for the exit code. If the process has just
        ended, they take the exit code from the event loop, which then reports 255.
        """
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _ready(self, process: asyncio.subprocess.Process) -> str:
        """Wait until the process serves and return its address.

        Then its output is copied by a background task.
        """
        if self.spec.wait_until_ready is None:
            address = await self._read_ready(process)
            self._copying.append(self._start_copying(process.stdout))
            return address
        self._copying.append(self._start_copying(process.stdout))
        answered = asyncio.create_task(self.spec.wait_until_ready())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise await self._ended_early(ended.result())
            return answered.result()
        finally:
            for task in (answered, ended):
                task.cancel()
            await asyncio.gather(answered, ended, return_exceptions=True)

    async def _ended_early(self, code: int) -> StartFailed:
        output = await self._last_output()
        return StartFailed(self.spec.name, f"{describe_exit(code)} before it was ready", output)

    async def _last_output(self) -> str:
        """Return the end of the output of a process that has ended."""
        await asyncio.wait(self._copying, timeout=LAST_OUTPUT_S)
        return _tail(self.spec.output)

    async def _read_ready(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            text = line.decode(errors="replace").rstrip("\n")
            if text.startswith(READY):
                return text[len(READY) :].split()[0]
            self._append_output(line)
        raise await self._ended_early(await process.wait())

    def _start_copying(self, stream: asyncio.StreamReader | None) -> asyncio.Task[None]:
        assert stream is not None
        return asyncio.create_task(self._copy_output(stream), name=f"{self.spec.name}-output")

    def _stop_copying(self) -> None:
        """End the copying from a process that has ended: one that it started may hold its output open."""
        for task in self._copying:
            task.cancel()

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        async for line in _lines(stream):
            self._append_output(line)

    def _append_output(self, line: bytes) -> None:
        """Write to the output file, which begins anew at its limit.

        A full disk loses output: a service that waits for its output to be read would stop.
        """
        with suppress(OSError), self.spec.output.open("ab") as output:
            if output.tell() > MAX_OUTPUT_BYTES:
                output.truncate(0)
            output.write(line)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream until it ends, those that exceed its limit in parts."""
    while True:
        try:
            yield await stream.readuntil()
        except asyncio.LimitOverrunError as error:
            yield await stream.read(error.consumed)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                yield error.partial
            return


def baton_command(command: str, config_file: Path) -> list[str]:
    """Return the command line that runs one service of this installation."""
    return [*python_module("baton.cli"), command, "--config", str(config_file)]


def _tail(path: Path, max_bytes: int = 2_000) -> str:
    """Return the end of the output of a process, which usually contains the error."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - max_bytes))
            return stream.read().decode(errors="replace").strip() or f"it printed nothing ({path})"
    except OSError:
        return f"it printed nothing ({path})"
