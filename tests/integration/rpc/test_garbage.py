"""Garbage on every internal port of a real cluster ends only its own call or connection (F-22).

After each case every process is alive, has grown by less than a bound, and answers a valid request exactly.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.cluster.placement import PlacementQuery
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Reason
from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.kv.block_hash import TokenIds, chain, root_hash, token_ids
from baton.core.kv.kv_layout import SAMPLER_VERSION, KvLayout, KvMemory
from baton.core.messages.jobs import Ack, Cancel, DecodeJob, Ping, PrefillJob, SessionHello
from baton.core.messages.peer_messages import Follow, HashRange, KvReady, PeerHello, PeerHelloReply, ReaderMessage
from baton.core.request import RequestActuals, Sampling
from baton.rpc.channel import MAX_MESSAGE_BYTES, channel_options
from baton.rpc.grpc_network import GrpcNetwork
from baton.rpc.grpc_streams import ACCEPTED
from baton.rpc.mappers.peer_mapper import from_owner_message, to_owner_message, to_reader_message
from baton.rpc.mappers.scheduler_mapper import to_placement_query, to_request_actuals, to_worker_report
from baton.rpc.mappers.worker_mapper import from_worker_message, to_gateway_message
from baton.wire.v1.peer_pb2 import OwnerMessage as OwnerMessagePb
from baton.wire.v1.scheduler_pb2 import FinishedRequest
from baton.wire.v1.worker_pb2 import WorkerMessage as WorkerMessagePb
from tests import grpc_methods
from tests.cluster import ProcessCluster, process_cluster
from tests.grpc_methods import EXPECTED_CODES, OK, CallEnd, Method, call
from tests.invalid_requests import mutated_bytes
from tests.malformed_connections import (
    HTTP2_START,
    Canary,
    broken_http2,
    exchange,
    grpc_call,
    grpc_message,
    internal_errors,
)
from tests.scale import sized
from tests.unit.rpc.strategies import messages, values
from tests.unit.worker.scripted_gateway import Gateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_GROWTH_BYTES = 300 * 2**20
"""Of one process over all of these tests; a few of the larger inputs, kept, would be more."""
VOCAB_SIZE = 4096
FUZZ = settings(
    max_examples=sized(4, 100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SESSION, EXCHANGE, REPORT = (
    "/baton.wire.v1.Worker/Session",
    "/baton.wire.v1.Peer/Exchange",
    "/baton.wire.v1.Scheduler/Report",
)
PLACE, FINISHED = "/baton.wire.v1.Scheduler/Place", "/baton.wire.v1.Scheduler/Finished"
INTERNAL = [method for method in grpc_methods.all_methods() if method.service.startswith("baton.wire.")]
EACH_METHOD = pytest.mark.parametrize("method", INTERNAL, ids=[method.path for method in INTERNAL])
NAMES = ("h0", "scheduler", "gateway")
GOOD_PROMPT = token_ids(range(10, 60))


class Target:
    """A cluster, the ports that its services call each other at, and what must be true of it after each
    case."""

    def __init__(self, cluster: ProcessCluster, worker: WorkerRef) -> None:
        self.cluster = cluster
        self.worker = worker
        self.ports = {"h0": port_of(worker.address), "scheduler": port_of(cluster.children["scheduler"].address)}
        self.admin_ports = {
            name: port_of(
                next(json.loads(line)["address"] for line in log_of(cluster, name) if '"admin_started"' in line)
            )
            for name in NAMES
        }
        self.network = GrpcNetwork(heartbeat_s=1.0)
        self.http = httpx.AsyncClient(base_url=cluster.url, timeout=30)
        self.channels = {
            name: grpc.aio.insecure_channel(f"127.0.0.1:{port}", channel_options(1.0, 2**30))
            for name, port in self.ports.items()
        }
        self.processes = {name: psutil.Process(cluster.pid(name)) for name in NAMES}
        self.before_bytes: dict[str, int] = {}
        self.good_tokens: list[int] = []
        self.layout: KvLayout
        self.served: dict[str, str] = {}
        """Which process serves a method, by its path."""

    async def start(self) -> None:
        gateway = Gateway(self.network, self.worker, "first")
        self.layout = (await gateway.connect()).layout
        await gateway.break_off()
        for method in INTERNAL:
            answers = {name: await self.call(name, method.path, b"\xff", wait_s=20) for name in self.ports}
            found = [name for name, answered in answers.items() if answered.code is not grpc.StatusCode.UNIMPLEMENTED]
            assert len(found) == 1, f"{method.path}: {answers}; a service that is added has to be called here, too"
            self.served[method.path] = found[0]
        self.good_tokens = await self._ask()
        self.before_bytes = {name: process.memory_info().rss for name, process in self.processes.items()}

    async def check(self) -> None:
        self.cluster.check_alive()
        assert await self._ask() == self.good_tokens
        grown = {
            name: (process.memory_info().rss - self.before_bytes[name]) >> 20
            for name, process in self.processes.items()
        }
        assert max(grown.values()) < MAX_GROWTH_BYTES >> 20, f"grown by MiB: {grown}"

    async def send(self, path: str, *raw: bytes, **how: Any) -> CallEnd:
        return await self.call(self.served[path], path, *raw, **how)

    async def call(
        self, name: str, path: str, *raw: bytes, wait_s: float = 10.0, max_replies: int = 1000, keep_open: bool = False
    ) -> CallEnd:
        return await call(self.channels[name], path, raw, wait_s=wait_s, max_replies=max_replies, keep_open=keep_open)

    def hello(self, **changes: Any) -> bytes:
        hello = SessionHello(gateway_id="x", session_id="x", last_seq=0, expected=self.worker)
        return to_gateway_message(replace(hello, **changes)).SerializeToString()

    def peer_hello(self, **changes: Any) -> bytes:
        reader = WorkerRef(worker_id="reader", worker_epoch=7, address="127.0.0.1:9")
        hello = PeerHello(reader=reader, owner=self.worker, layout=self.layout)
        return to_reader_message(replace(hello, **changes)).SerializeToString()

    async def aclose(self) -> None:
        await self.http.aclose()
        await self.network.aclose()
        for channel in self.channels.values():
            await channel.close()

    async def _ask(self) -> list[int]:
        body = {
            "prompt": list(GOOD_PROMPT),
            "max_tokens": 6,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def log_of(cluster: ProcessCluster, name: str) -> list[str]:
    return [
        line for file in (cluster.directory / "logs" / name).glob("*.log") for line in file.read_text().splitlines()
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[Target]:
    async with process_cluster(
        prefill=0,
        decode=0,
        hybrid=1,
        admin_port=0,
        heartbeat_s=0.5,
        detection_s=10.0,
        scheduler_wait_s=30.0,
        step_limit_s=60.0,
    ) as cluster:
        made = Target(cluster, (await cluster.status()).workers[0].worker)
        await made.start()
        yield made
        await cluster.until(lambda status: not status.workers[0].links, 20, "nothing is kept of owners that are none")
        await made.check()
        await made.aclose()
        await cluster.check_clean()
        assert internal_errors(line for name in NAMES for line in log_of(cluster, name)) == [], (
            "what others send is no error of ours"
        )


# Bytes that are no message, messages that make no sense.


@pytest.mark.fault("F-22")
@EACH_METHOD
@FUZZ
@given(data=st.data())
async def test_any_message_of_any_method_is_answered_or_refused(
    target: Target, method: Method, data: st.DataObject
) -> None:
    schema = messages(method.message).map(lambda message: message.SerializeToString())
    raw = data.draw(st.lists(st.one_of(st.binary(max_size=60), schema), min_size=1, max_size=3))
    answered = await target.send(method.path, *(raw if method.streams_requests else raw[:1]), wait_s=0.5, max_replies=1)
    assert answered.code in EXPECTED_CODES | {OK, None}, answered
    await target.check()


@pytest.mark.fault("F-22")
@EACH_METHOD
async def test_bytes_that_are_no_message_end_the_call_as_invalid(
    target: Target, method: Method, tmp_path: Path
) -> None:
    canary = Canary(tmp_path)
    canary.check_payloads()
    for raw in (b"\xff" * 20, b"\x0a\x7f", b"\x0b" * 200, *canary.payloads):
        answered = await target.send(method.path, raw)
        assert answered.code is INVALID, (raw, answered)
    canary.check()
    await target.check()


@pytest.mark.fault("F-22")
@EACH_METHOD
async def test_a_message_over_the_limit_ends_the_call(target: Target, method: Method) -> None:
    process = target.processes[target.served[method.path]]
    before_bytes = process.memory_info().rss
    answered = await target.send(method.path, bytes(MAX_MESSAGE_BYTES + 1), wait_s=20)
    assert answered.code is grpc.StatusCode.RESOURCE_EXHAUSTED, answered
    assert process.memory_info().rss - before_bytes < MAX_MESSAGE_BYTES / 2
    await target.check()


# Messages that could be ours.


@FUZZ
@given(query=values(PlacementQuery), actuals=values(RequestActuals), report=values(WorkerReport))
async def test_a_scheduler_answers_whatever_could_be_asked(
    target: Target, query: PlacementQuery, actuals: RequestActuals, report: WorkerReport
) -> None:
    for path, message in (
        (PLACE, to_placement_query(replace(query, model="demo", deadline_s=1.0))),
        (FINISHED, FinishedRequest(actuals=[to_request_actuals(actuals)])),
        (REPORT, to_worker_report(report)),
    ):
        answered = await target.send(path, message.SerializeToString(), wait_s=0.5)
        assert answered.code in (OK, None), (
            path,
            answered,
        )  # a request that nobody can run waits while somebody may still report
    await target.check()


JOBS = st.one_of(values(PrefillJob), values(DecodeJob))


@settings(FUZZ, max_examples=sized(6, 60))
@given(jobs=st.lists(JOBS, min_size=1, max_size=8), in_vocabulary=st.booleans())
async def test_every_job_that_could_be_asked_for_has_an_end(
    target: Target, jobs: list[PrefillJob | DecodeJob], in_vocabulary: bool
) -> None:
    gateway = Gateway(target.network, target.worker, "jobs")
    await gateway.connect()
    asked = [possible(job, in_vocabulary) for job in jobs]
    gateway.send(*asked)
    await gateway.until(
        lambda: all(gateway.failures[job.job] or gateway.deltas[job.job] for job in asked), within_s=30.0
    )
    gateway.send(*(Cancel(job=job.job, reason=Reason.CANCELLED) for job in asked))
    assert not gateway.is_broken
    await gateway.break_off()
    await target.check()


NUMBERS = count()


def possible(job: PrefillJob | DecodeJob, in_vocabulary: bool) -> PrefillJob | DecodeJob:
    """The job under an id of its own, for long enough to begin, and drawn as this release draws."""
    ids: TokenIds = token_ids(token % VOCAB_SIZE for token in job.token_ids) if in_vocabulary else job.token_ids
    sampling: Sampling = replace(job.sampling, sampler_version=SAMPLER_VERSION)
    return replace(
        job,
        job=JobId(request_id=b"garbage-%d" % next(NUMBERS), attempt=job.job.attempt),
        token_ids=ids,
        sampling=sampling,
        deadline_s=0.5,
    )


@FUZZ
@given(said=st.lists(values(ReaderMessage), min_size=1, max_size=8))
async def test_an_owner_answers_whatever_a_reader_could_say(target: Target, said: list[ReaderMessage]) -> None:
    raw = [to_reader_message(message).SerializeToString() for message in said if not isinstance(message, PeerHello)]
    answered = await target.send(EXCHANGE, target.peer_hello(), *raw)
    assert answered.code is OK, answered
    for reply in answered.replies:
        from_owner_message(OwnerMessagePb.FromString(reply))
    await target.check()


async def test_an_owner_serves_its_readers_after_all_of_that(target: Target) -> None:
    """The good request's blocks are in its cache, and nothing of another salt's."""
    size = target.layout.block_size_tokens
    for number, (salt, found) in enumerate(((b"", len(GOOD_PROMPT) // size), (b"other", 0))):
        root = root_hash(model_fingerprint=target.layout.model_fingerprint, cache_salt=salt, block_size_tokens=size)
        subject = HashRange(hashes=tuple(chain(root, GOOD_PROMPT, size)), cache_salt=salt)
        follow = Follow(transfer_id=TransferId(5 + number), subject=subject, have_blocks=0, resume_from_block=0)
        said = (target.peer_hello(), to_reader_message(follow).SerializeToString())
        answered = await target.send(EXCHANGE, *said, keep_open=True, max_replies=2)
        ready = from_owner_message(OwnerMessagePb.FromString(answered.replies[1]))
        assert isinstance(ready, KvReady)
        assert (len(ready.block_ids), ready.final) == (found, True)


# Streams that begin wrongly.


async def test_a_stream_that_begins_wrongly_is_ended(target: Target) -> None:
    stranger = replace(target.worker, worker_epoch=target.worker.worker_epoch ^ 1)
    for message in (Ping(), Ack(seq=2**64 - 1), Cancel(job=JobId(request_id=b"x", attempt=0), reason=Reason.CANCELLED)):
        answered = await target.send(SESSION, to_gateway_message(message).SerializeToString())
        assert (answered.code, answered.replies) == (INVALID, ()), message
    for hello in (target.hello(expected=stranger), target.hello(protocol_version=99)):
        answered = await target.send(SESSION, hello, keep_open=True)
        (reply,) = (from_worker_message(WorkerMessagePb.FromString(raw)) for raw in answered.replies)
        assert (reply.worker, reply.resumed) == (target.worker, False)  # type: ignore[union-attr]
    assert (await target.send(SESSION, target.hello(), target.hello())).code is INVALID
    assert (await target.send(SESSION, target.hello(session_id="x" * 2**20))).code is INVALID
    follow = Follow(
        transfer_id=TransferId(1), subject=JobId(request_id=b"x", attempt=0), have_blocks=0, resume_from_block=0
    )
    for wrong, why in (
        (to_reader_message(follow).SerializeToString(), "protocol_version"),
        (target.peer_hello(owner=stranger), "wrong_epoch"),
        (target.peer_hello(protocol_version=99), "protocol_version"),
        (target.peer_hello(layout=replace(target.layout, model_fingerprint="other")), "layout_mismatch"),
    ):
        answered = await target.send(EXCHANGE, wrong, keep_open=True)
        (refusal,) = (from_owner_message(OwnerMessagePb.FromString(raw)) for raw in answered.replies)
        assert isinstance(refusal, PeerHelloReply)
        assert refusal.refusal.startswith(why)
        assert refusal.memory == ()
    await target.check()


# An owner that is none: the worker as a reader.

Say = Callable[[WorkerRef], bytes]
"""What a false owner says to whoever greets it, given the name that it goes by."""


@asynccontextmanager
async def false_owner(say_: Say, number: int) -> AsyncIterator[WorkerRef]:
    async def exchange(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.send_initial_metadata(ACCEPTED)
        await context.read()
        await context.write(say_(owner))
        await asyncio.sleep(60)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(exchange)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.wire.v1.Peer", {"Exchange": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    owner = WorkerRef(worker_id=f"liar-{number}", worker_epoch=1, address=f"127.0.0.1:{port}")
    await server.start()
    try:
        yield owner
    finally:
        await server.stop(0)


def lies(target: Target, canary: Canary) -> Iterator[Say]:
    """Bytes that are no message, and hellos whose memory is nobody's, though everything else in them is
    right."""
    for raw in (b"\xff" * 20, b"", *canary.payloads):
        yield lambda _, raw=raw: raw  # type: ignore[misc]
    whole = {
        "agent_name": "liar",
        "agent_metadata": b"metadata",
        "memory_kind": "dram",
        "device_id": 0,
        "base_address": 4096,
        "block_stride_bytes": target.layout.block_bytes,
        "num_blocks": 100,
        "generation_table_address": 2**20,
        "generation_entry_bytes": 32,
    }
    wrong: list[dict[str, Any]] = [{"agent_metadata": payload} for payload in (b"", b"\0" * 1000, *canary.payloads)]
    wrong += [
        {"num_blocks": 2**62},
        {"block_stride_bytes": 0},
        {"generation_entry_bytes": 0},
        {"memory_kind": "\u20ac"},
    ]
    for changes in wrong:
        yield lambda owner, changes=changes: hello_of(target, owner, KvMemory(owner=owner, **(whole | changes)))  # type: ignore[misc]
    yield lambda owner: hello_of(target, owner)


def hello_of(target: Target, owner: WorkerRef, *memory: KvMemory) -> bytes:
    reply = PeerHelloReply(owner=owner, layout=target.layout, memory=memory, lease_s=2.0)
    return to_owner_message(reply).SerializeToString()


async def test_a_worker_that_reads_from_garbage_fails_the_job_and_lives(target: Target, tmp_path: Path) -> None:
    canary = Canary(tmp_path)
    gateway = Gateway(target.network, target.worker, "reads")
    await gateway.connect()

    async def read_from(lie: Say, number: int) -> None:
        async with false_owner(lie, number) as owner:
            job = DecodeJob(
                job=JobId(request_id=b"reads-%d" % number, attempt=0),
                token_ids=GOOD_PROMPT,
                num_prompt_tokens=len(GOOD_PROMPT),
                sampling=Sampling(max_tokens=4),
                sample_indices=(0,),
                deadline_s=1.0,
                owner=owner,
            )
            gateway.send(job)
            failure = await gateway.failed(job.job, within_s=30.0)
            assert failure.reason is not Reason.INTERNAL, (number, failure)

    await asyncio.gather(*(read_from(lie, number) for number, lie in enumerate(lies(target, canary))))
    await gateway.break_off()
    canary.check()
    await target.check()


# Connections.


async def test_broken_http2_ends_its_own_connection_only(target: Target, tmp_path: Path) -> None:
    rng, canary, slots = Random(22), Canary(tmp_path), asyncio.Semaphore(16)

    async def one(port: int, data: bytes) -> None:
        async with slots:
            await exchange(port, [data], quiet_s=0.15)

    for name, path, first in (
        ("h0", SESSION, target.hello()),
        ("h0", EXCHANGE, target.peer_hello()),
        ("scheduler", PLACE, b""),
    ):
        good = HTTP2_START + grpc_call(path, grpc_message(first))
        changed = [mutated_bytes(rng, good) for _ in range(sized(20, 500))]
        broken = [] if path == EXCHANGE else [*broken_http2(path).values()]
        await asyncio.gather(*(one(target.ports[name], data) for data in (*broken, *changed, *canary.payloads)))
        await target.check()
    canary.check()


async def test_bytes_on_the_admin_ports_are_answered_or_closed(target: Target, tmp_path: Path) -> None:
    rng, canary, slots = Random(23), Canary(tmp_path), asyncio.Semaphore(16)
    good = b"GET /metrics?x=%41 HTTP/1.1\r\nhost: localhost\r\naccept: */*\r\n\r\n"
    post = b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(10_000)
    upgrade = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: eA==\r\n\r\n"
    )

    async def one(port: int, pieces: list[bytes]) -> None:
        async with slots:
            received = await exchange(port, pieces, quiet_s=0.15)
            assert not re.match(rb"HTTP/1\.1 5", received.data), (pieces, received)

    for name, port in target.admin_ports.items():
        changed = [mutated_bytes(rng, good) for _ in range(sized(15, 300))]
        await asyncio.gather(
            *(one(port, [data]) for data in (*changed, *canary.payloads, post, upgrade, bytes(range(256)) * 40))
        )
        before_bytes = target.processes[name].memory_info().rss
        for endless in (b"y" * 2**20, (b"x: " + b"y" * 1000 + b"\r\n") * 1000):
            await one(port, [b"GET /health HTTP/1.1\r\nx: ", *[endless] * 64])
        assert target.processes[name].memory_info().rss - before_bytes < 16 * 2**20
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
    canary.check()
    await target.check()
