"""A scripted gateway: one session to one worker, over any network."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from baton.core.errors import Failure, StreamBroken
from baton.core.ids import JobId, WorkerRef
from baton.core.interfaces import Network
from baton.core.messages.jobs import Ack, Cancel, Heartbeat, Job, SessionHello, SessionHelloReply, Step
from baton.core.request import FinishReason, TokenDelta


class Gateway:
    """One scripted session to one worker. Records every delta and failure, and acknowledges by default."""

    def __init__(self, network: Network, worker: WorkerRef, name: str = "g0") -> None:
        self.deltas: dict[JobId, list[TokenDelta]] = defaultdict(list)
        self.failures: dict[JobId, list[Failure]] = defaultdict(list)
        self.steps: list[Step] = []
        self.heartbeats: list[Heartbeat] = []
        self.reply: SessionHelloReply | None = None
        self.acknowledges = True
        self.is_broken = False
        self.last_seq = 0
        self._network = network
        self._worker = worker
        self._name = name
        self._stream: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def connect(self) -> SessionHelloReply:
        """Connect, or reconnect and resume."""
        self._stream = await self._network.open_session(self._worker.address)
        self._stream.send(
            SessionHello(
                gateway_id=self._name,
                session_id=f"{self._name}-{self._worker}",
                last_seq=self.last_seq,
                expected=self._worker,
            )
        )
        reply = await self._stream.receive()
        assert isinstance(reply, SessionHelloReply)
        self.reply = reply
        self._reading = asyncio.create_task(self._read(self._stream))
        return reply

    def send(self, *messages: Job | Cancel | Ack) -> None:
        for message in messages:
            self._stream.send(message)

    async def break_off(self) -> None:
        """Break the stream. Processed messages stay processed."""
        await self._stream.aclose()
        assert self._reading is not None
        await asyncio.wait((self._reading,))

    async def ended(self, job: JobId, samples: Sequence[int] = (0,), within_s: float = 60.0) -> list[TokenDelta]:
        """Wait until the job has ended and return its deltas. Raises AssertionError if it failed."""
        await self.until(lambda: self.failures[job] or self._has_finished(job, samples), within_s)
        assert not self.failures[job], self.failures[job]
        return self.deltas[job]

    async def ended_prefill(self, job: JobId) -> TokenDelta:
        """Return the first token of a prefill job with one sample."""
        await self.until(lambda: self.failures[job] or self.deltas[job])
        assert not self.failures[job], self.failures[job]
        return self.deltas[job][0]

    async def failed(self, job: JobId, within_s: float = 60.0) -> Failure:
        await self.until(lambda: self.failures[job], within_s)
        return self.failures[job][0]

    async def until(self, condition: Any, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def tokens(self, job: JobId, sample: int = 0) -> list[int]:
        return [t for d in self.deltas[job] if d.sample_index == sample for t in d.token_ids]

    def finishes(self, job: JobId) -> list[tuple[int, FinishReason]]:
        return [(d.sample_index, d.finish) for d in self.deltas[job] if d.finish is not None]

    def _has_finished(self, job: JobId, samples: Sequence[int]) -> bool:
        return {sample for sample, _ in self.finishes(job)} >= set(samples)

    async def _read(self, stream: Any) -> None:
        try:
            while True:
                message = await stream.receive()
                assert message.seq == self.last_seq + 1, f"message {message.seq} after {self.last_seq}"
                self.last_seq = message.seq
                if isinstance(message, Heartbeat):
                    self.heartbeats.append(message)
                else:
                    self.steps.append(message)
                    for delta in message.deltas:
                        self.deltas[delta.job].append(delta)
                    for failure in message.failures:
                        self.failures[failure.job].append(failure.failure)
                if self.acknowledges:
                    stream.send(Ack(seq=message.seq))
                self._changed.set()
        except StreamBroken:
            self.is_broken = True
            self._changed.set()
