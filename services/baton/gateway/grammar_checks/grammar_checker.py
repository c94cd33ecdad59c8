"""Compiles clients' grammars in a child process, so that a hostile one cannot hold the gateway."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import QUEUE_FULL_RETRY_S, Code, Failure, Reason, Refused
from baton.gateway.input.client_call import InvalidField
from baton.runtime.process.process import with_parent_death_signal

_MAX_REPLY = 4096
_RESULT_BYTES = 200
_TOO_EXPENSIVE = "the grammar is too expensive to compile; simplify it"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarCheckLimits:
    """Limits of a grammar checker. The child limits its own memory.

    wait_s: longest time that a request waits for its grammar, in the queue and while it is compiled.
    """

    compile_s: float = 2.0
    wait_s: float = 10.0
    start_s: float = 30.0
    max_waiting: int = 64
    cache_bytes: int = 1 << 20
    max_deaths: int = 3
    deaths_window_s: float = 60.0
    retry_s: float = 10.0


class GrammarChecker:
    """Checks grammars, one at a time, in one child process that is replaced if it dies. Implements
    `GrammarCheck`."""

    def __init__(self, argv: Sequence[str], limits: GrammarCheckLimits | None = None) -> None:
        """argv: command line of a program that follows the protocol of `grammar_compiler`."""
        self._argv = with_parent_death_signal(argv)
        self._limits = limits or GrammarCheckLimits()
        self._results: OrderedDict[bytes, str] = OrderedDict()
        self._size = 0
        self._waiting: dict[bytes, asyncio.Task[str]] = {}
        self._clients: Counter[bytes] = Counter()
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._deaths: list[float] = []
        self._closed = False

    async def check(self, grammar: str, field: str) -> None:
        """Return if `grammar` compiles. Raises InvalidField, or Refused if it cannot be checked."""
        text = grammar.encode()
        key = hashlib.sha256(text).digest()
        message = self._results.get(key)
        if message is not None:
            self._results.move_to_end(key)
        else:
            task = self._shared(key, text)
            self._clients[key] += 1
            try:
                async with asyncio.timeout(self._limits.wait_s):
                    message = await asyncio.shield(task)
            except TimeoutError:
                raise _unavailable(self._limits.retry_s) from None
            finally:
                self._clients[key] -= 1
                if not self._clients[key] and key not in self._waiting:
                    del self._clients[key]
        if message:
            raise InvalidField(field, message, Reason.INVALID_GRAMMAR)

    async def aclose(self) -> None:
        """End the child and the checks that wait."""
        self._closed = True
        tasks = list(self._waiting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    def _shared(self, key: bytes, text: bytes) -> asyncio.Task[str]:
        task = self._waiting.get(key)
        if task is None or task.done():
            if self._closed:
                raise _unavailable(self._limits.retry_s)
            if len(self._waiting) >= self._limits.max_waiting:
                message = f"{len(self._waiting)} grammars wait to be compiled; retry later"
                raise Refused(
                    Failure(
                        code=Code.RESOURCE_EXHAUSTED,
                        reason=Reason.QUEUE_FULL,
                        message=message,
                        retry_after_s=QUEUE_FULL_RETRY_S,
                    )
                )
            task = self._waiting[key] = asyncio.create_task(self._compile(key, text))
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    def _forget(self, key: bytes, task: asyncio.Task[str]) -> None:
        if self._waiting.get(key) is task:
            del self._waiting[key]
            if not self._clients[key]:
                del self._clients[key]
        if not task.cancelled():
            task.exception()  # retrieved, also if each client has gone

    async def _compile(self, key: bytes, text: bytes) -> str:
        async with self._lock:
            if not self._clients[key]:
                return ""  # all clients have gone, so nobody reads this
            message = await self._try(text)
            if message is None:
                return _TOO_EXPENSIVE  # not kept: on a busy machine the next try may be in time
            self._keep(key, message)
            return message

    async def _try(self, text: bytes) -> str | None:
        child = await self._started()
        try:
            async with asyncio.timeout(self._limits.compile_s):
                message = await _ask(child, text)
        except (TimeoutError, OSError, EOFError, ValueError):
            await self._kill()
            return None
        except asyncio.CancelledError:
            await self._kill()
            raise
        self._deaths.clear()
        return message

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._kill()
        now = asyncio.get_running_loop().time()
        self._deaths = [at for at in self._deaths if now - at < self._limits.deaths_window_s]
        if len(self._deaths) >= self._limits.max_deaths and now - self._deaths[-1] < self._limits.retry_s:
            raise _unavailable(self._limits.retry_s)
        pipe = asyncio.subprocess.PIPE
        try:
            self._child = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe)
            async with asyncio.timeout(self._limits.start_s):
                await _reply(self._child)  # its table is built
        except (TimeoutError, OSError, EOFError, ValueError):
            await self._died()
            raise _unavailable(self._limits.retry_s) from None
        except asyncio.CancelledError:
            await self._kill()
            raise
        return self._child

    async def _died(self) -> None:
        self._deaths.append(asyncio.get_running_loop().time())
        await self._kill()

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # Process.kill may reap the child before the event loop does
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()

    def _keep(self, key: bytes, message: str) -> None:
        self._results[key] = message
        self._size += _RESULT_BYTES + len(message)
        while self._size > self._limits.cache_bytes:
            _, old = self._results.popitem(last=False)
            self._size -= _RESULT_BYTES + len(old)


async def _ask(child: asyncio.subprocess.Process, text: bytes) -> str:
    assert child.stdin is not None
    child.stdin.write(struct.pack("<I", len(text)) + text)
    await child.stdin.drain()
    return await _reply(child)


async def _reply(child: asyncio.subprocess.Process) -> str:
    assert child.stdout is not None
    (size,) = struct.unpack("<I", await child.stdout.readexactly(4))
    if size > _MAX_REPLY:
        raise ValueError("the reply is too long")
    return str(json.loads(await child.stdout.readexactly(size)))


def _unavailable(retry_s: float) -> Refused:
    message = "grammars cannot be compiled at present; retry later, or send the request without a grammar"
    return Refused(
        Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message=message, retry_after_s=retry_s)
    )
