"""Compiles clients' grammars in a child process, so that a hostile one cannot hold the gateway."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import QUEUE_FULL_RETRY_S, Code, Failure, Reason, Refused
from baton.gateway.grammar_checks.compiler_process import CompilerLost, CompilerProcess
from baton.gateway.grammar_checks.grammar_problem import GrammarProblem
from baton.gateway.grammar_checks.tenant_queue import TenantQueue
from baton.gateway.input.answers.answer_grammar import AnswerGrammar
from baton.gateway.input.client_call import InvalidField
from baton.runtime.logging import get_logger
from baton.runtime.observability.metrics import GrammarMetrics

log = get_logger(__name__)

COMPILER_MEMORY_BYTES = 1 << 30
"""Memory by which the child may grow for all grammars that it has compiled."""
_RESULT_BYTES = 400
JOB_BYTES = 2048
"""Objects of a grammar in the queue."""
_TOO_EXPENSIVE = GrammarProblem(message="the grammar is too expensive to compile; simplify it")


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarCheckLimits:
    """Limits of a grammar checker. The memory of the child is an argument of its program.

    wait_s: longest time that a request waits for its grammar, in the queue and while it is compiled.
    max_waiting_bytes, max_waiting_bytes_of_tenant: memory of the grammars in the queue.
    cache_bytes: memory of the results that are kept.
    max_deaths: starts that may fail in `deaths_window_s`; then no child is started for `retry_s`.
    """

    compile_s: float = 2.0
    wait_s: float = 10.0
    start_s: float = 30.0
    max_waiting_bytes: int = 8 << 20
    max_waiting_bytes_of_tenant: int = 4 << 20
    cache_bytes: int = 1 << 20
    max_deaths: int = 3
    deaths_window_s: float = 60.0
    retry_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Job:
    """A grammar that waits, and the number of requests that wait for it."""

    key: bytes
    text: bytes
    result: asyncio.Future[GrammarProblem | None]
    num_clients: int = 0


class GrammarChecker:
    """Checks grammars, one at a time, in one child process that is replaced if it dies. Implements
    `GrammarCheck`."""

    def __init__(self, argv: Sequence[str], metrics: GrammarMetrics, limits: GrammarCheckLimits | None = None) -> None:
        """argv: command line of a program that follows the protocol of `grammar_compiler`."""
        self._compiler = CompilerProcess(argv)
        self._metrics = metrics
        self._limits = limits or GrammarCheckLimits()
        self._results: OrderedDict[bytes, GrammarProblem | None] = OrderedDict()
        self._num_bytes = 0
        self._waiting: dict[tuple[str, bytes], _Job] = {}
        self._queue: TenantQueue[_Job] = TenantQueue()
        self._server: asyncio.Task[None] | None = None
        self._failed_starts: list[float] = []
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Memory of the results that are kept."""
        return self._num_bytes

    async def check(self, grammar: AnswerGrammar, tenant: str) -> None:
        """Return if `grammar` compiles. Raises InvalidField, or Refused if it cannot be checked."""
        text = grammar.written.text.encode()
        key = hashlib.sha256(text).digest()
        if key in self._results:
            self._results.move_to_end(key)
            self._metrics.checks.labels("known").inc()
            problem = self._results[key]
        else:
            problem = await self._wait_for(tenant, key, text)
        if problem is not None:
            raise _invalid(grammar, problem)

    async def aclose(self) -> None:
        """End the child. Requests that wait are refused."""
        self._closed = True
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        for job in self._waiting.values():
            if not job.result.done():
                job.result.set_exception(_unavailable(self._limits.retry_s))
        await self._compiler.kill()

    async def _wait_for(self, tenant: str, key: bytes, text: bytes) -> GrammarProblem | None:
        """Return the result of a new grammar. Equal ones of a tenant share a place in the queue."""
        job = self._waiting.get((tenant, key)) or self._new_job(tenant, key, text)
        job.num_clients += 1
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(job.result)
        except TimeoutError:
            self._metrics.checks.labels("timeout").inc()
            raise _unavailable(self._limits.retry_s) from None
        finally:
            job.num_clients -= 1

    def _new_job(self, tenant: str, key: bytes, text: bytes) -> _Job:
        limits = self._limits
        if self._closed:
            raise _unavailable(limits.retry_s)
        size = JOB_BYTES + len(text)
        if (of_tenant := self._queue.size_of(tenant) + size) > limits.max_waiting_bytes_of_tenant:
            self._metrics.checks.labels("queue_full").inc()
            raise _queue_full("your", of_tenant, limits.max_waiting_bytes_of_tenant)
        if (of_all := self._queue.size + size) > limits.max_waiting_bytes:
            self._metrics.checks.labels("queue_full").inc()
            raise _queue_full("all", of_all, limits.max_waiting_bytes)
        job = self._waiting[tenant, key] = _Job(key, text, asyncio.get_running_loop().create_future())
        self._queue.put(tenant, job, size)
        self._metrics.waiting.set(len(self._queue))
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        return job

    async def _serve(self) -> None:
        """Compile the grammars of the queue until it is empty."""
        clock = asyncio.get_running_loop().time
        while len(self._queue):
            tenant, job = self._queue.take()
            self._metrics.waiting.set(len(self._queue))
            began_s = clock()
            try:
                if job.num_clients:  # else all have gone
                    job.result.set_result(await self._compile(job))
            except BaseException as error:
                is_refused = isinstance(error, Refused)
                job.result.set_exception(error if is_refused else _unavailable(self._limits.retry_s))
                job.result.exception()  # retrieved, also if each client has gone
                if not is_refused:
                    raise
            finally:
                self._queue.charge(tenant, clock() - began_s)
                del self._waiting[tenant, job.key]

    async def _compile(self, job: _Job) -> GrammarProblem | None:
        if job.key in self._results:  # another tenant had the same
            return self._results[job.key]
        await self._start()
        began_s = asyncio.get_running_loop().time()
        try:
            problem = await self._compiler.problem_of(job.text, self._limits.compile_s)
        except CompilerLost:
            log.warning("grammar_compiler_lost", grammar_bytes=len(job.text))
            self._metrics.checks.labels("too_expensive").inc()
            self._metrics.compiler_deaths.inc()
            return _TOO_EXPENSIVE  # not kept: on a busy machine the next try may be in time
        self._metrics.compile_s.observe(asyncio.get_running_loop().time() - began_s)
        self._metrics.checks.labels("valid" if problem is None else "invalid").inc()
        self._failed_starts.clear()
        self._keep(job.key, problem)
        return problem

    async def _start(self) -> None:
        """Start a child unless one runs. Raises Refused if that fails, or failed several times before."""
        if self._compiler.is_running:
            return
        now = asyncio.get_running_loop().time()
        limits = self._limits
        self._failed_starts = [at for at in self._failed_starts if now - at < limits.deaths_window_s]
        if len(self._failed_starts) < limits.max_deaths or now - self._failed_starts[-1] >= limits.retry_s:
            try:
                await self._compiler.start(limits.start_s)
                return log.info("grammar_compiler_started", pid=self._compiler.pid)
            except CompilerLost:
                self._metrics.compiler_deaths.inc()
                self._failed_starts.append(asyncio.get_running_loop().time())
        self._metrics.checks.labels("unavailable").inc()
        raise _unavailable(limits.retry_s)

    def _keep(self, key: bytes, problem: GrammarProblem | None) -> None:
        self._results[key] = problem
        self._num_bytes += _size(problem)
        while self._num_bytes > self._limits.cache_bytes:
            _, old = self._results.popitem(last=False)
            self._num_bytes -= _size(old)


def _size(problem: GrammarProblem | None) -> int:
    return _RESULT_BYTES + (0 if problem is None else 4 * len(problem.message + problem.rule + problem.where))


def _invalid(grammar: AnswerGrammar, problem: GrammarProblem) -> InvalidField:
    place = grammar.written.places.get(problem.rule, grammar.field)
    where = f"{place} at {problem.where}" if problem.where else place
    return InvalidField(grammar.field, f"{where}: {problem.message}", Reason.INVALID_GRAMMAR)


def _unavailable(retry_s: float) -> Refused:
    message = "grammars cannot be compiled at present; retry later, or send the request without a grammar"
    return _refused(message, retry_s)


def _queue_full(whose: str, num_bytes: int, limit: int) -> Refused:
    message = (
        f"{whose} grammars that wait to be compiled would take {num_bytes:,} bytes; at most {limit:,} are allowed; "
        "retry later"
    )
    return _refused(message, QUEUE_FULL_RETRY_S)


def _refused(message: str, retry_s: float) -> Refused:
    return Refused(
        Failure(code=Code.RESOURCE_EXHAUSTED, reason=Reason.QUEUE_FULL, message=message, retry_after_s=retry_s)
    )
