"""Serves a stub scheduler and a stub hybrid worker over gRPC in one process.

Run with `python -m`; prints the address. Tokens depend only on prompt, sample and position
(`tests.unit.gateway.fakes.token_at`) and are sent immediately.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.core.ids import WorkerRef
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.model.loading.model_source import DEMO_DIR
from baton.rpc.grpc_server import GrpcServer
from baton.runtime.network.in_process_network import InProcessNetwork
from tests.unit.gateway.fakes import StubScheduler, StubWorker, token_at

MAX_MODEL_LEN = 128
MAX_NUM_SEQS = 16
HEARTBEAT_S = 5.0
"""Long enough that no stream breaks on a busy machine."""


async def serve_stubs(
    worker_class: type[StubWorker] = StubWorker,
    scheduler_class: type[StubScheduler] = StubScheduler,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    max_num_seqs: int = MAX_NUM_SEQS,
    tokens_a_step: int = MAX_MODEL_LEN,
    token_at: Callable[[Sequence[int], int, int], int] = token_at,
    block_size_tokens: int = 4,
    heartbeat_s: float = HEARTBEAT_S,
) -> None:
    """Serve until cancelled, and print the address."""
    unused_network = InProcessNetwork()
    scheduler, worker = scheduler_class(unused_network), worker_class(unused_network, "h0")
    worker.prefill_s = worker.step_s = 0.0
    worker.tokens_a_step = tokens_a_step
    worker.token_at = token_at
    server = GrpcServer(heartbeat_s=heartbeat_s)
    server.add_scheduler(scheduler)
    server.add_worker(worker)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    worker.ref = WorkerRef(worker_id="h0", worker_epoch=1, address=address)
    fingerprint = tokenizer_fingerprint(DEMO_DIR)
    layout = replace(worker.report.layout, tokenizer_fingerprint=fingerprint, block_size_tokens=block_size_tokens)
    worker.report = replace(
        worker.report, worker=worker.ref, layout=layout, max_model_len=max_model_len, max_num_seqs=max_num_seqs
    )
    scheduler.add(worker)
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_stubs())
