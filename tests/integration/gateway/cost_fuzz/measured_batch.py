"""Sends batches of cases to a gateway process, and says what they cost."""

import asyncio
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.grpc_methods import call
from tests.integration.gateway.cost_fuzz.cost_case import CostCase
from tests.integration.gateway.cost_fuzz.pipelined_http import ANSWER_S, Answer, send_pipelined, send_raw
from tests.integration.gateway.gateway_process import GatewayProcess

MAX_CALLBACK_S = 0.05
"""CPU time of one callback of the event loop."""
MAX_REQUEST_BYTES = 64 * 2**20
"""Memory that one request may take."""
MAX_HELD_BYTES = 96 * 2**20
"""Growth of the process over a whole run, not of one batch: caches take up to 25 MiB, and the allocator keeps
32 MiB before it is trimmed, and what lies between pieces in use."""
RELEASE_S = 10.0
"""Time after a batch within which all its memory must be released."""
NUM_CONNECTIONS = 8
MAX_CALLS = 8
"""gRPC calls at a time."""
_SERVER_ERRORS = {
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.DATA_LOSS: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_ACCOUNT = re.compile(r'^baton_(?:memory_budget_used_bytes\{account="(\w+)"\}|open_requests) (\S+)$', re.MULTILINE)


@dataclass(slots=True)
class Cost:
    """What a batch, or one case, cost the gateway.

    callback_s: CPU time of the slowest callback that took long, and callback: what it was.
    grown_bytes: largest resident memory during the batch, less that before it.
    held: accounts that were not empty `RELEASE_S` after the batch.
    """

    callback_s: float = 0.0
    callback: str = ""
    grown_bytes: int = 0
    held: dict[str, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @property
    def slow_callback(self) -> str:
        """Text about the slowest callback if it exceeded its limit, else empty."""
        if self.callback_s <= MAX_CALLBACK_S:
            return ""
        return f"a callback took {self.callback_s * 1e3:.0f} ms of CPU time: {self.callback}"

    def problems(self, cases: Sequence[CostCase]) -> list[str]:
        """Return the limits that were exceeded."""
        found = [self.slow_callback] if self.slow_callback else []
        if self.grown_bytes > MAX_REQUEST_BYTES:
            found.append(f"memory grew by {self.grown_bytes / 2**20:.0f} MiB")
        if self.held:
            found.append(f"not released after {RELEASE_S:g} s: {self.held}")
        for case, answer in zip(cases, self.answers, strict=True):
            is_error = answer.status >= 500 or b'"status": 5' in answer.tail
            if is_error and not (case.may_time_out and b'"status": 504' in answer.tail):
                found.append(f"status {answer.status}, {bytes(answer.tail)!r}: {case}")
            if case.is_legal and not answer.status:
                found.append(f"no response: {case}")
        return found


class GatewayMeter:
    """Measures what requests cost a gateway process that runs under `measured_gateway`."""

    def __init__(self, process: GatewayProcess, report: Path) -> None:
        self.process = process
        self._report = report
        self._read_chars = 0
        self._base_bytes = 0

    async def warm_up(self) -> None:
        """Send some requests, so that later ones do not pay for what is loaded once."""
        for _ in range(20):
            await self.process.check()
        await self.process.check_grpc()

    async def measure(self, cases: Sequence[CostCase]) -> Cost:
        """Send cases together, and wait until their memory is released."""
        before_bytes = self.process.rss_bytes
        self._base_bytes = self._base_bytes or before_bytes
        self._slowest()
        _reset_peak(self.process.pid)
        cost = Cost(answers=await self._send(cases))
        cost.grown_bytes = _peak_bytes(self.process.pid) - before_bytes
        cost.held = await self._held()
        cost.callback_s, cost.callback = self._slowest()
        return cost

    async def _send(self, cases: Sequence[CostCase]) -> list[Answer]:
        """Send all cases: pipelined over HTTP, concurrently over gRPC."""
        slots = asyncio.Semaphore(MAX_CALLS)
        answers: list[Answer] = [Answer() for _ in cases]

        async def alone(index: int, case: CostCase) -> None:
            async with slots:
                send = self._send_grpc(case) if case.is_grpc else send_raw(self.process.http_port, case)
                answers[index] = await send

        http = [index for index, case in enumerate(cases) if not (case.is_grpc or case.is_raw)]

        async def pipelined() -> None:
            connections = min(NUM_CONNECTIONS, max(1, len(http)))
            sent = await send_pipelined(self.process.http_port, [cases[index] for index in http], connections)
            for index, answer in zip(http, sent, strict=True):
                answers[index] = answer

        others = [alone(index, case) for index, case in enumerate(cases) if case.is_grpc or case.is_raw]
        await asyncio.gather(pipelined(), *others)
        return answers

    async def _send_grpc(self, case: CostCase) -> Answer:
        end = await call(self.process.channel, case.path, [case.content], wait_s=ANSWER_S, max_replies=10**6)
        if end.code is grpc.StatusCode.OK:
            return Answer(status=200)
        status = 0 if end.code is None else _SERVER_ERRORS.get(end.code, 400)
        return Answer(status=status, tail=bytearray(f"{end.code} {end.details}".encode()[:1000]))

    async def _held(self) -> dict[str, float]:
        """Return what is still held after some time: bytes and requests by account, and resident memory."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RELEASE_S
        while True:
            text = (await self.process.http.get("/metrics")).text
            held = {name or "open requests": float(value) for name, value in _ACCOUNT.findall(text) if float(value)}
            if (grown := self.process.rss_bytes - self._base_bytes) > MAX_HELD_BYTES:
                held["resident memory"] = grown
            if not held:
                return held
            if loop.time() > deadline_s:
                return held
            await asyncio.sleep(0.05)

    def _slowest(self) -> tuple[float, str]:
        """Return the slowest callback since the last call, as (seconds, name)."""
        with self._report.open() as file:
            file.seek(self._read_chars)
            lines = file.read()
        self._read_chars += len(lines.encode())
        slow = [line.partition(" ") for line in lines.splitlines()]
        return max(((float(seconds), name) for seconds, _, name in slow), default=(0.0, ""))


async def find_failing(meter: GatewayMeter, cases: Sequence[CostCase], cost: Cost) -> list[str]:
    """Return the problems of a batch, each with its case, or with the batch if no case has it alone.

    The batch is sent again to find the cases. A slow callback counts only if it repeats: on a shared machine,
    CPU time includes what the hypervisor took. One that does not is a warning. Everything else counts once.
    """
    problems = cost.problems(cases)
    if not problems:
        return []
    if len(cases) == 1:
        if cost.slow_callback and not (await meter.measure(cases)).slow_callback:
            warnings.warn(f"seen once: {cost.slow_callback}\n    {cases[0]}", stacklevel=2)
            problems.remove(cost.slow_callback)
        return [f"{problem}\n    {cases[0]}" for problem in problems]
    found = [f"{problem}\n    {len(cases)} cases together" for problem in problems if problem != cost.slow_callback]
    for case in cases:
        found += await find_failing(meter, [case], await meter.measure([case]))
    if not found:
        repeated = await meter.measure(cases)
        found = [f"{problem}\n    {len(cases)} cases together" for problem in repeated.problems(cases)]
    if not found:
        warnings.warn(f"seen once in {len(cases)} cases: {problems}", stacklevel=2)
    return found


def _reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_bytes(pid: int) -> int:
    """Return the largest resident memory of a process since `_reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
