"""Child process that compiles grammars, see `grammar_compiler`. It is started when it is needed."""

import asyncio
import contextlib
import json
import os
import signal
import struct
from collections.abc import Sequence

from baton.gateway.grammar_checks.grammar_problem import GrammarProblem
from baton.runtime.process.process import with_parent_death_signal

_MAX_REPLY = 16 * 1024
_LOST = (TimeoutError, OSError, EOFError, ValueError, TypeError)


class CompilerLost(Exception):
    """The child has ended, or it took too long and was killed. The next one is started when it is needed."""


class CompilerProcess:
    """One child. Used by one task at a time."""

    def __init__(self, argv: Sequence[str]) -> None:
        """argv: command line of a program that follows the protocol of `grammar_compiler`."""
        self._argv = with_parent_death_signal(argv)
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if there is none."""
        return self._child.pid if self.is_running and self._child is not None else None

    @property
    def is_running(self) -> bool:
        """True if the child was started and has not ended."""
        return self._child is not None and self._child.returncode is None

    async def start(self, timeout_s: float) -> None:
        """Start the child, and wait until its table is built. Raises CompilerLost."""
        await self.kill()
        pipe = asyncio.subprocess.PIPE
        try:
            self._child = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe)
            async with asyncio.timeout(timeout_s):
                await _reply(self._child)
        except BaseException as error:
            await self._lost(error)
            raise

    async def problem_of(self, text: bytes, timeout_s: float) -> GrammarProblem | None:
        """Compile a grammar. Returns None if it is valid. Raises CompilerLost."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            async with asyncio.timeout(timeout_s):
                self._child.stdin.write(struct.pack("<I", len(text)) + text)
                await self._child.stdin.drain()
                return await _reply(self._child)
        except BaseException as error:
            await self._lost(error)
            raise

    async def kill(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # Process.kill may reap the child before the event loop does
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()

    async def _lost(self, error: BaseException) -> None:
        await self.kill()
        if isinstance(error, _LOST):
            raise CompilerLost from error


async def _reply(child: asyncio.subprocess.Process) -> GrammarProblem | None:
    assert child.stdout is not None
    (size,) = struct.unpack("<I", await child.stdout.readexactly(4))
    if size > _MAX_REPLY:
        raise ValueError("the reply is too long")
    reply = json.loads(await child.stdout.readexactly(size))
    return None if reply is None else GrammarProblem(**reply)
