"""Supervises one child process: starts it, restarts it a limited number of times, and ends it."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.runtime.logging import get_logger
from baton.runtime.process.process import with_parent_death_signal
from baton.runtime.process.process_end import describe_exit

log = get_logger(__name__)

READY = "ready "
"""A service prints this word and its address on standard output once it serves."""
KILL_WAIT_S = 5.0


class ServiceFailed(BatonError):
    """A required process did not start, or died too often. The message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimit:
    """Limits how often a process may die, with exponential backoff.

    deaths: largest number of deaths within `window_s` seconds.
    first_wait_s: delay of the first restart. It doubles with each death, up to `max_wait_s`.
    """

    deaths: int = 5
    window_s: float = 60.0
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


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


class RestartBudget:
    """Counts the deaths of one process against a `RestartLimit`.

    Used for child processes and worker actors.
    """

    def __init__(self, limit: RestartLimit) -> None:
        self._limit = limit
        self._deaths: deque[float] = deque()

    def wait_s(self, now_s: float) -> float | None:
        """Record a death at `now_s`. Return the seconds until the restart, or None after too many deaths."""
        while self._deaths and now_s - self._deaths[0] > self._limit.window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        if len(self._deaths) > self._limit.deaths:
            return None
        return min(self._limit.max_wait_s, self._limit.first_wait_s * 2 ** (len(self._deaths) - 1))


class Child:
    """One supervised child process.

    It runs in its own session, so that Ctrl-C reaches only this process. On Linux the kernel kills it when
    this process ends.
    """

    def __init__(
        self,
        spec: ChildSpec,
        *,
        limit: RestartLimit | None = None,
        on_restart: Callable[[str, int], None] | None = None,
    ) -> None:
        self.spec = spec
        self.address = ""
        self.restarts = 0
        self._budget = RestartBudget(limit or RestartLimit())
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._copying: asyncio.Task[None] | None = None
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
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)

    async def start(self) -> str:
        """Start the process and return its address once it serves.

        Raises ServiceFailed with the end of its output.
        """
        self.spec.output.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.output.open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(self.spec.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **self.spec.environ},
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                self.address = await self._ready(self._process)
        except TimeoutError:
            await self._kill()
            raise ServiceFailed(
                f"{self.spec.name} was not ready within {self.spec.start_timeout_s:g} s; its output: {self.spec.output}"
            ) from None
        except BaseException:
            await self._kill()
            raise
        log.info("child_started", child=self.spec.name, pid=self.pid, address=self.address)
        return self.address

    async def supervise(self) -> None:
        """Restart the process whenever it dies, until `stop` is called.

        Raises ServiceFailed if it dies too often.
        """
        loop = asyncio.get_running_loop()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            if self._stopping:
                return
            log.warning("child_died", child=self.spec.name, pid=self.pid, exit_code=code)
            while True:
                wait_s = self._budget.wait_s(loop.time())
                if wait_s is None:
                    raise ServiceFailed(
                        f"{self.spec.name} keeps dying (last: {describe_exit(code)}); its output: {self.spec.output}"
                    )
                await asyncio.sleep(wait_s)
                if self._stopping:
                    return
                try:
                    await self.start()
                except ServiceFailed as error:
                    log.warning("child_restart_failed", child=self.spec.name, error=str(error))
                    continue
                break
            self.restarts += 1
            if self._on_restart is not None:
                self._on_restart(self.spec.name, code)

    async def stop(self, grace_s: float) -> None:
        """End the process with SIGTERM, then with SIGKILL after `grace_s`. Can be called twice.

        Raises ServiceFailed if the process does not end.
        """
        self._stopping = True
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            await self._kill()
        finally:
            if self._copying is not None:
                self._copying.cancel()
                await asyncio.gather(self._copying, return_exceptions=True)

    async def _kill(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            raise ServiceFailed(
                f"{self.spec.name} (pid {self.pid}) did not end within {KILL_WAIT_S:g} s of SIGKILL"
            ) from None

    async def _ready(self, process: asyncio.subprocess.Process) -> str:
        """Wait until the process serves and return its address.

        Then its output is copied by a background task.
        """
        if self.spec.wait_until_ready is None:
            address = await self._read_ready(process)
            self._copying = asyncio.create_task(self._copy_output(process), name=f"{self.spec.name}-output")
            return address
        self._copying = asyncio.create_task(self._copy_output(process), name=f"{self.spec.name}-output")
        answered = asyncio.create_task(self.spec.wait_until_ready())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await self._copying
                raise self._ended_early(ended.result())
            return answered.result()
        finally:
            for task in (answered, ended):
                task.cancel()
            await asyncio.gather(answered, ended, return_exceptions=True)

    def _ended_early(self, code: int) -> ServiceFailed:
        return ServiceFailed(f"{self.spec.name} {describe_exit(code)} before it was ready: {_tail(self.spec.output)}")

    async def _read_ready(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip("\n")
            if text.startswith(READY):
                return text[len(READY) :].split()[0]
            self._append_output(line)
        raise self._ended_early(await process.wait())

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._append_output(line)

    def _append_output(self, line: bytes) -> None:
        with self.spec.output.open("ab") as output:
            output.write(line)


def baton_command(command: str, config_file: Path) -> list[str]:
    """Return the command line that runs one service of this installation."""
    return [sys.executable, "-m", "baton.cli", command, "--config", str(config_file)]


def _tail(path: Path, max_bytes: int = 2_000) -> str:
    """Return the end of the output of a process, which usually contains the error."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - max_bytes))
            return stream.read().decode(errors="replace").strip() or f"it printed nothing ({path})"
    except OSError:
        return f"it printed nothing ({path})"
