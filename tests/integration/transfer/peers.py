"""Starts peer processes and sends commands to them. All processes end with the test."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.free_port import free_port

REPO = Path(__file__).parents[3]
START_S = 90.0
ANSWER_S = 90.0


class PeerDied(Exception):
    """The process ended before it answered."""


class PeerHandle:
    """One process. `ask` sends a command and waits for its result. Commands may run concurrently."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.ref: dict[str, Any] = {}
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen())

    async def started(self) -> "PeerHandle":
        self.ref = (await asyncio.wait_for(asyncio.shield(self._ready), START_S))["ready"]
        return self

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "command": command, **arguments}).encode() + b"\n")
        answered = await asyncio.wait_for(answer, ANSWER_S)
        assert "error" not in answered, answered["error"]
        return answered

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._listener

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not line.startswith(b"{"):
                continue
            message = json.loads(line)
            waiting = self._ready if "ready" in message else self._waiting.pop(message.pop("id"))
            if not waiting.done():
                waiting.set_result(message)
        for waiting in (self._ready, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(PeerDied(f"process {self.process.pid} has ended"))
                waiting.exception()  # mark it as retrieved: no caller may be waiting


class Peers:
    """All processes of one test."""

    def __init__(self) -> None:
        self.handles: list[PeerHandle] = []

    async def start(
        self,
        kind: str,
        worker_id: str,
        epoch: int,
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        netns: str = "",
    ) -> PeerHandle:
        arguments = [
            sys.executable,
            "-m",
            "tests.integration.transfer.peer_process",
            kind,
            worker_id,
            str(epoch),
            str(port or free_port("127.0.0.1")),
        ]
        process = await asyncio.create_subprocess_exec(
            *(["ip", "netns", "exec", netns] if netns else []),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.handles.append(PeerHandle(process))
        return await self.handles[-1].started()


@asynccontextmanager
async def peers() -> AsyncIterator[Peers]:
    started = Peers()
    try:
        yield started
    finally:
        for handle in started.handles:
            if handle.process.returncode is None:
                handle.signal(signal.SIGCONT)
            await handle.kill()
