"""One child process: started, watched, started again within bounds, and never left behind."""

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

log = get_logger(__name__)

READY = "ready "
KILL_WAIT_S = 5.0


class ServiceFailed(BatonError):
    """A process that a cluster needs did not start, or died more often than it may; the message names its
    log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimit:
    """At most `deaths` in `window_s` seconds. A restart waits `first_wait_s`, doubled with each death,
    `max_wait_s` at most."""

    deaths: int = 5
    window_s: float = 60.0
    first_wait_s: float = 0.2
    max_wait_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to start a process. It prints `ready ADDRESS` once it serves; whatever else it prints goes to
    `output`. A program that is not ours does not say so: `wait_until_ready` then returns its address once it
    answers."""

    name: str
    argv: Sequence[str]
    output: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    wait_until_ready: Callable[[], Coroutine[Any, Any, str]] | None = None


class RestartBudget:
    """Counts deaths against a `RestartLimit`; shared by child processes and worker actors."""

    def __init__(self, limit: RestartLimit) -> None:
        self._limit = limit
        self._deaths: deque[float] = deque()

    def wait_s(self, now_s: float) -> float | None:
        """Seconds to wait before the restart after a death at `now_s`; None when there were too many."""
        while self._deaths and now_s - self._deaths[0] > self._limit.window_s:
            self._deaths.popleft()
        self._deaths.append(now_s)
        if len(self._deaths) > self._limit.deaths:
            return None
        return min(self._limit.max_wait_s, self._limit.first_wait_s * 2 ** (len(self._deaths) - 1))


class Child:
    """One service process under supervision. Its own session, so that Ctrl-C reaches us alone; the kernel
    ends it when we end."""

    def __init__(
        self, spec: ChildSpec, *, limit: RestartLimit | None = None, on_restart: Callable[[str], None] | None = None
    ) -> None:
        self.spec = spec
        self.address = ""
        self.restarts = 0
        self._budget = RestartBudget(limit or RestartLimit())
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode if self._process is not None else None

    def resume(self) -> None:
        """Let a stopped process go on, so that it can end."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)

    async def start(self) -> str:
        """Start the process; returns the address it serves at. Raises ServiceFailed with the end of its
        output."""
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
        """Start the process again whenever it dies, until `stop`. Raises ServiceFailed when it dies too often
        or does not come back."""
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
                        f"{self.spec.name} keeps dying (last exit code {code}); its output: {self.spec.output}"
                    )
                await asyncio.sleep(wait_s)
                if self._stopping:
                    return
                try:
                    await self.start()
                except ServiceFailed as error:
                    log.warning("child_not_restarted", child=self.spec.name, error=str(error))
                    continue
                break
            self.restarts += 1
            if self._on_restart is not None:
                self._on_restart(self.spec.name)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when the process is gone. Safe to call twice. Raises
        ServiceFailed if it stays."""
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
            if self._drain is not None:
                self._drain.cancel()
                await asyncio.gather(self._drain, return_exceptions=True)

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
        """The address, as the process says it or as it is found to answer; from now on its output is
        copied."""
        if self.spec.wait_until_ready is None:
            address = await self._read_ready(process)
            self._drain = asyncio.create_task(self._copy_output(process), name=f"{self.spec.name}-output")
            return address
        self._drain = asyncio.create_task(self._copy_output(process), name=f"{self.spec.name}-output")
        answered = asyncio.create_task(self.spec.wait_until_ready())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((answered, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await self._drain
                raise self._ended_early(ended.result())
            return answered.result()
        finally:
            for task in (answered, ended):
                task.cancel()
            await asyncio.gather(answered, ended, return_exceptions=True)

    def _ended_early(self, code: int) -> ServiceFailed:
        return ServiceFailed(
            f"{self.spec.name} ended with exit code {code} before it was ready: {_tail(self.spec.output)}"
        )

    async def _read_ready(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            text = line.decode(errors="replace").rstrip("\n")
            if text.startswith(READY):
                return text[len(READY) :].split()[0]
            self._keep(line)
        raise self._ended_early(await process.wait())

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        with self.spec.output.open("ab") as output:
            output.write(line)


def baton_command(command: str, config_file: Path) -> list[str]:
    """The command line of one service of this very installation."""
    return [sys.executable, "-m", "baton.cli", command, "--config", str(config_file)]


def _tail(path: Path, max_bytes: int = 2_000) -> str:
    """The end of what a process printed, which says why it ended."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - max_bytes))
            return stream.read().decode(errors="replace").strip() or f"it printed nothing ({path})"
    except OSError:
        return f"it printed nothing ({path})"
