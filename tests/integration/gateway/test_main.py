"""`baton gateway` with HTTP and gRPC ports, the demo model's tokenizer and stub workers behind gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import Code, ConfigError, ModelError, Reason, Refused
from baton.core.ids import WorkerRef
from baton.core.tokenizer_fingerprint import tokenizer_fingerprint
from baton.gateway.gateway_main import serve
from baton.gateway.text.chat_prompt import ChatPrompt
from baton.gateway.text.tokenizer import HfTokenizer
from baton.model.loading.model_source import DEMO_DIR
from baton.rpc.admin_rpc import AdminClient
from baton.rpc.grpc_server import GrpcServer
from baton.rpc.inference_rpc import InferenceClient
from baton.runtime.config.settings import GatewayConfig
from baton.runtime.network.addresses import listen
from baton.runtime.network.in_process_network import InProcessNetwork
from baton.runtime.process.process import Stop
from tests.free_port import free_port
from tests.unit.gateway.fakes import StubScheduler, StubWorker, until

pytestmark = pytest.mark.integration

TIMES = {
    "heartbeat_s": 5.0,
    "detection_s": 30.0,
    "scheduler_wait_s": 60.0,
    "drain_s": 5.0,
    "receive_deadline_s": 30.0,
}
"""Long enough that no peer counts as lost on a busy machine."""
PROMPT = "What does os.getcwd do?"


@dataclass(slots=True, kw_only=True)
class RunningGateway:
    url: str
    config: GatewayConfig
    scheduler: StubScheduler
    worker: StubWorker
    stop: Stop
    task: "asyncio.Task[None]"


@asynccontextmanager
async def running_gateway(**times: float) -> AsyncIterator[RunningGateway]:
    unused_network = InProcessNetwork()
    scheduler, worker = StubScheduler(unused_network), StubWorker(unused_network, "h0")
    cluster = GrpcServer(heartbeat_s=TIMES["heartbeat_s"])
    cluster.add_scheduler(scheduler)
    cluster.add_worker(worker)
    port = await cluster.start("127.0.0.1", 0)
    worker.ref = WorkerRef(worker_id="h0", worker_epoch=1, address=f"127.0.0.1:{port}")
    layout = replace(worker.report.layout, tokenizer_fingerprint=tokenizer_fingerprint(DEMO_DIR))
    worker.report = replace(worker.report, worker=worker.ref, layout=layout)
    scheduler.add(worker)
    config = GatewayConfig(
        http_port=0,
        grpc_port=free_port("127.0.0.1"),
        schedulers=(f"127.0.0.1:{port}",),
        **TIMES | times,
    )
    stop, urls = Stop(), asyncio.Queue[str]()
    task = asyncio.create_task(serve(config, stop, urls.put_nowait))
    first = asyncio.create_task(urls.get())
    await asyncio.wait((task, first), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    url = first.result()
    try:
        async with httpx.AsyncClient(timeout=20) as client, asyncio.timeout(60):
            while (await client.get(f"{url}/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield RunningGateway(url=url, config=config, scheduler=scheduler, worker=worker, stop=stop, task=task)
    finally:
        stop.request()
        async with asyncio.timeout(60):
            await task
        await cluster.stop(0.1)


async def test_http_and_grpc_return_the_same_response() -> None:
    demo = HfTokenizer(DEMO_DIR)
    output_ids = list(await demo.encode(" It returns the directory \u20ac, doesn't it?", add_special_tokens=False))
    async with running_gateway() as gateway:
        gateway.worker.token_at = lambda _prompt, _sample, index: output_ids[index]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": PROMPT}], max_tokens=len(output_ids), stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
        assert text == demo.decode(output_ids)
        assert list(gateway.worker.jobs[0].token_ids) == list(
            await demo.encode(
                await demo.chat_text(ChatPrompt(messages=[{"role": "user", "content": PROMPT}])),
                add_special_tokens=False,
            )
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.config.grpc_port}") as channel:
            client = InferenceClient(channel, "gateway")
            generation = await client.generate({"prompt": "hi", "max_tokens": len(output_ids)}, timeout_s=30)
            chunks = [await generation.receive()]
            while not chunks[-1].is_last:
                chunks.append(await generation.receive())
            assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == demo.decode(output_ids)
            assert [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids] == output_ids
            assert generation.request_id == gateway.scheduler.queries[-1].request_id.hex()
            await generation.aclose()
            with pytest.raises(Refused) as refused:
                await client.generate({"prompt": "x", "temperature": 3.0})
            assert (refused.value.failure.code, refused.value.failure.reason) == (
                Code.INVALID_ARGUMENT,
                Reason.INVALID_REQUEST,
            )
            assert list(await client.tokenize("hi")) == list(await demo.encode("hi"))
            status = await AdminClient(channel, "gateway").status()
            assert [worker.worker.worker_id for worker in status.workers] == ["h0"]
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    demo.close()


async def test_grpc_cancel_cancels_the_request_on_all_workers() -> None:
    async with (
        running_gateway() as gateway,
        grpc.aio.insecure_channel(f"127.0.0.1:{gateway.config.grpc_port}") as channel,
    ):
        gateway.worker.token_at = lambda *_: 300
        generation = await InferenceClient(channel, "gateway").generate({"prompt": "hi", "max_tokens": 900})
        await generation.receive()
        await generation.aclose()
        await until(lambda: gateway.worker.cancels)
        assert gateway.worker.open_jobs == []


async def test_shutdown_finishes_open_streams_and_rejects_new_requests() -> None:
    async with running_gateway(drain_s=300.0) as gateway:
        gateway.worker.token_at = lambda *_: 300
        gateway.worker.is_paused = True  # until the last request was refused
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            body = {"prompt": "hi", "max_tokens": 20, "stream": True}
            stream = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: gateway.worker.jobs)
            gateway.stop.request()
            async with asyncio.timeout(60):
                while (await client.get("/ready")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            gateway.worker.is_paused = False
            assert (await stream).text.endswith("data: [DONE]\n\n")
        async with asyncio.timeout(60):  # far less than the time to drain
            await gateway.task


async def test_start_error_names_the_invalid_setting(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="--schedulers"):
        await serve(GatewayConfig(), Stop(), print)
    sock = listen("127.0.0.1", 0, flag="x")
    port = sock.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} .*--http-port"):
        await serve(GatewayConfig(http_port=port, schedulers=("127.0.0.1:1",)), Stop(), print)
    sock.close()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        await serve(GatewayConfig(http_port=0, model=str(tmp_path), schedulers=("127.0.0.1:1",)), Stop(), print)
