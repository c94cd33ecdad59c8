"""Stub cluster behind Baton's gateway: a scheduler, a prefill and a decode worker that compute nothing.

python -m bench.systems.gateway_stub STEP_S STAMPS

The stubs use real gRPC. The prefill worker sends a first token as soon as it gets a job. The decode worker
sends one token per step to each of its jobs. Prints `ready ADDRESS`. STAMPS is the file for
`gateway_load.Stamps`.
"""

import asyncio
import sys
from itertools import count
from pathlib import Path

import uvloop

from baton.core.cluster.cache_stats import CacheStats
from baton.core.cluster.cluster_snapshot import ClusterUpdate
from baton.core.cluster.decision_record import DecisionRecord
from baton.core.cluster.placement import Placement, PlacementQuery
from baton.core.cluster.worker_command import WorkerCommand
from baton.core.cluster.worker_report import BlockCounts, LinkReport, WorkerReport, WorkerRole, WorkerState
from baton.core.ids import DecisionId, JobId, WorkerRef
from baton.core.interfaces import Duplex, Source
from baton.core.kv.kv_layout import KvComponent, KvLayout, LayerGroup
from baton.core.messages.jobs import (
    Cancel,
    DecodeJob,
    Heartbeat,
    PrefillJob,
    ReceivedGatewayMessage,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.messages.prefix_messages import PrefixReply, PrefixRequest
from baton.core.request import FinishReason, RequestActuals, TokenDelta
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.model.loading.model_source import resolve_model
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.network.in_process_network import InProcessDuplex
from baton.runtime.network.mailbox import Mailbox
from bench.support.gateway_load import Stamps

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 600
"""Token ids of every response, in a cycle: words of the demo model's tokenizer."""
HEARTBEAT_S = 0.5


class StubWorkers:
    """Two workers at one address. The hello message of a session names the worker."""

    def __init__(self, refs: dict[str, WorkerRef], layout: KvLayout, step_s: float, stamps: Stamps) -> None:
        self._refs = refs
        self._layout = layout
        self._step_s = step_s
        self._stamps = stamps

    async def session(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage]) -> None:
        """Serve one gateway session until it ends."""
        hello = await stream.receive()
        assert isinstance(hello, SessionHello)
        worker = self._refs[hello.expected.worker_id]
        stream.send(SessionHelloReply(worker=worker, layout=self._layout, resumed=False, oldest_seq=1))
        numbers = count(1)
        decoder = StubDecoder(stream, numbers, self._step_s)
        tasks = [asyncio.create_task(self._beat(stream, numbers)), asyncio.create_task(decoder.run())]
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, PrefillJob):
                    self._prefill(stream, message, next(numbers))
                elif isinstance(message, DecodeJob):
                    decoder.add(message.job, message.sampling.max_tokens)
                elif isinstance(message, Cancel):
                    decoder.drop(message.job)
        finally:
            for task in tasks:
                task.cancel()

    async def peer(self, stream: Duplex[OwnerMessage, ReaderMessage]) -> None:
        """Do nothing: no worker pulls KV."""

    async def copy_prefix(self, stream: Duplex[PrefixReply, PrefixRequest]) -> None:
        """Do nothing: no prefix is exported."""

    def _prefill(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage], job: PrefillJob, seq: int) -> None:
        arrived_ns = self._stamps.now_ns()
        finish = FinishReason.LENGTH if job.sampling.max_tokens == 1 else None
        delta = TokenDelta(
            job=job.job, sample_index=0, output_index=0, token_ids=(FIRST_TOKEN_ID,), finish=finish, is_last=True
        )
        self._stamps.put(job.sampling.max_tokens, arrived_ns)
        stream.send(Step(seq=seq, deltas=(delta,)))

    async def _beat(self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage], numbers: "count[int]") -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            stream.send(Heartbeat(seq=next(numbers), steps_done=0, step_age_s=0.0, draining=False))


class StubDecoder:
    """Sends one token per step to each job of one session."""

    def __init__(
        self, stream: Duplex[WorkerMessage, ReceivedGatewayMessage], numbers: "count[int]", step_s: float
    ) -> None:
        self._stream = stream
        self._numbers = numbers
        self._step_s = step_s
        self._jobs: dict[JobId, tuple[int, int]] = {}  # tokens sent, tokens to send
        self._has_jobs = asyncio.Event()

    def add(self, job: JobId, max_tokens: int) -> None:
        """Start to send tokens of a job, `max_tokens` in all."""
        self._jobs[job] = (0, max_tokens)
        self._has_jobs.set()

    def drop(self, job: JobId) -> None:
        """Stop sending tokens of a job. Does nothing if the job has ended."""
        self._jobs.pop(job, None)

    async def run(self) -> None:
        """Send tokens until cancelled.

        Late steps are caught up, so the offered rate does not depend on sending time.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._has_jobs.wait()
            due_s = loop.time()
            while self._jobs:
                due_s += self._step_s
                await asyncio.sleep(due_s - loop.time())
                deltas = tuple([self._next_delta(job) for job in tuple(self._jobs)])
                self._stream.send(Step(seq=next(self._numbers), deltas=deltas))
            self._has_jobs.clear()

    def _next_delta(self, job: JobId) -> TokenDelta:
        index, max_tokens = self._jobs[job]
        is_last = index + 1 == max_tokens
        if is_last:
            del self._jobs[job]
        else:
            self._jobs[job] = (index + 1, max_tokens)
        token_ids = (FIRST_TOKEN_ID + index % NUM_TOKEN_IDS,)
        return TokenDelta(
            job=job,
            sample_index=0,
            output_index=index,
            token_ids=token_ids,
            finish=FinishReason.LENGTH if is_last else None,
            is_last=is_last,
        )


class StubScheduler:
    """Scheduler that always places on the same prefill worker, and decode worker for more than one token."""

    def __init__(self, reports: dict[str, WorkerReport]) -> None:
        self._reports = reports
        self._decisions = count()

    async def place(self, query: PlacementQuery) -> Placement:
        return Placement(
            decision_id=DecisionId(f"{next(self._decisions):016x}"),
            scheduler_id="stub",
            policy="stub",
            prefill=self._reports["prefill"].worker,
            decode=self._reports["decode"].worker if query.max_tokens > 1 else None,
        )

    async def finished(self, *actuals: RequestActuals) -> None:
        pass

    async def watch(self) -> Source[ClusterUpdate]:
        updates: Mailbox[ClusterUpdate] = Mailbox(1)
        updates.put(ClusterUpdate(scheduler_id="stub", reports=tuple(self._reports.values())))
        return InProcessDuplex[ClusterUpdate, ClusterUpdate](updates, Mailbox(1))

    async def explain(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        return ()

    async def drain(self, worker_id: str, *, node_shutting_down: bool = False) -> bool:
        return False

    async def clear_tenant(self, tenant_salt: bytes) -> tuple[str, ...]:
        return ()

    async def cache_stats(self) -> CacheStats:
        return CacheStats()

    async def report(self, stream: Duplex[WorkerCommand, WorkerReport]) -> None:
        """Do nothing: the stub workers do not report."""


def layout() -> KvLayout:
    """Return a layout with the fingerprint of the demo tokenizer.

    The gateway does not use the other fields.
    """
    components = tuple(KvComponent(name=name, num_kv_heads=2, head_dim=64, dtype="bfloat16") for name in ("k", "v"))
    return KvLayout(
        model_fingerprint="stub",
        tokenizer_fingerprint=tokenizer_fingerprint(resolve_model("demo")),
        block_size_tokens=16,
        groups=(LayerGroup(layer_begin=0, num_layers=6, components=components),),
    )


def report(worker: WorkerRef, role: WorkerRole, *peers: WorkerRef) -> WorkerReport:
    """Return the report of an idle worker with links to `peers`."""
    return WorkerReport(
        worker=worker,
        report_seq=1,
        role=role,
        state=WorkerState.READY,
        model="demo",
        layout=layout(),
        blocks=BlockCounts(total=1000, free=1000, cached=0, used=0, receiving=0, quarantined=0),
        max_model_len=16384,
        max_num_seqs=1024,
        links=tuple(LinkReport(peer=peer, bytes_per_s=1e9, transport="none") for peer in peers),
    )


async def main(step_s: float, stamps: Stamps) -> None:
    server = GrpcServer(heartbeat_s=2.0)
    refs: dict[str, WorkerRef] = {}
    reports: dict[str, WorkerReport] = {}
    server.add_worker(StubWorkers(refs, layout(), step_s, stamps))
    server.add_scheduler(StubScheduler(reports))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    prefill, decode = [WorkerRef(worker_id=role, worker_epoch=1, address=address) for role in ("prefill", "decode")]
    refs |= {"prefill": prefill, "decode": decode}
    reports |= {"prefill": report(prefill, WorkerRole.PREFILL), "decode": report(decode, WorkerRole.DECODE, prefill)}
    print(f"ready {address}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(float(sys.argv[1]), Stamps(Path(sys.argv[2]))))
