"""Invalid messages to any method of an internal port end only their call or stream (F-22).

After each case every process is alive, has grown by less than a bound, and answers a valid request exactly.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.cluster.placement import PlacementQuery
from baton.core.cluster.worker_report import WorkerReport
from baton.core.errors import Reason
from baton.core.ids import JobId, TransferId, WorkerRef
from baton.core.kv.block_hash import TokenIds, chain, root_hash, token_ids
from baton.core.kv.kv_layout import SAMPLER_VERSION, KvMemory
from baton.core.messages.jobs import Ack, Cancel, DecodeJob, Ping, PrefillJob
from baton.core.messages.peer_messages import Follow, HashRange, KvReady, PeerHello, PeerHelloReply, ReaderMessage
from baton.core.request import RequestActuals, Sampling
from baton.rpc.channel import MAX_MESSAGE_BYTES
from baton.rpc.mappers.peer_mapper import from_owner_message, to_owner_message, to_reader_message
from baton.rpc.mappers.scheduler_mapper import to_placement_query, to_request_actuals, to_worker_report
from baton.rpc.mappers.worker_mapper import from_worker_message, to_gateway_message
from baton.rpc.streams.grpc_streams import ACCEPTED
from baton.wire.v1.peer_pb2 import OwnerMessage as OwnerMessagePb
from baton.wire.v1.scheduler_pb2 import FinishedRequest
from baton.wire.v1.worker_pb2 import WorkerMessage as WorkerMessagePb
from tests.grpc_methods import EXPECTED_CODES, OK, Method
from tests.integration.rpc.checked_cluster import (
    EXCHANGE,
    FINISHED,
    GOOD_PROMPT,
    INTERNAL,
    PLACE,
    REPORT,
    SESSION,
    CheckedCluster,
)
from tests.malformed_connections import Canary
from tests.scale import sized
from tests.unit.rpc.strategies import messages, values
from tests.unit.worker.scripted_gateway import Gateway

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

INVALID = grpc.StatusCode.INVALID_ARGUMENT
VOCAB_SIZE = 4096
FUZZ = settings(
    max_examples=sized(4, 100),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
EACH_METHOD = pytest.mark.parametrize("method", INTERNAL, ids=[method.path for method in INTERNAL])


# Any bytes and any message, to each method.


@pytest.mark.fault("F-22")
@EACH_METHOD
@FUZZ
@given(data=st.data())
async def test_any_message_to_any_method_is_answered_or_refused(
    cluster: CheckedCluster, method: Method, data: st.DataObject
) -> None:
    schema = messages(method.message).map(lambda message: message.SerializeToString())
    raw = data.draw(st.lists(st.one_of(st.binary(max_size=60), schema), min_size=1, max_size=3))
    answered = await cluster.send(
        method.path, *(raw if method.streams_requests else raw[:1]), wait_s=0.5, max_replies=1
    )
    assert answered.code in EXPECTED_CODES | {OK, None}, answered
    await cluster.check()


@pytest.mark.fault("F-22")
@EACH_METHOD
async def test_unparsable_bytes_end_the_call_with_invalid_argument(
    cluster: CheckedCluster, method: Method, tmp_path: Path
) -> None:
    canary = Canary(tmp_path)
    canary.check_payloads()
    for raw in (b"\xff" * 20, b"\x0a\x7f", b"\x0b" * 200, *canary.payloads):
        answered = await cluster.send(method.path, raw)
        assert answered.code is INVALID, (raw, answered)
    canary.check()
    await cluster.check()


@pytest.mark.fault("F-22")
@EACH_METHOD
async def test_message_over_the_size_limit_ends_the_call(cluster: CheckedCluster, method: Method) -> None:
    process = cluster.processes[cluster.served[method.path]]
    before_bytes = process.memory_info().rss
    answered = await cluster.send(method.path, bytes(MAX_MESSAGE_BYTES + 1), wait_s=20)
    assert answered.code is grpc.StatusCode.RESOURCE_EXHAUSTED, answered
    assert process.memory_info().rss - before_bytes < MAX_MESSAGE_BYTES / 2
    await cluster.check()


# Well-formed messages with any values.


@FUZZ
@given(query=values(PlacementQuery), actuals=values(RequestActuals), report=values(WorkerReport))
async def test_scheduler_answers_any_well_formed_message(
    cluster: CheckedCluster, query: PlacementQuery, actuals: RequestActuals, report: WorkerReport
) -> None:
    for path, message in (
        (PLACE, to_placement_query(replace(query, model="demo", deadline_s=1.0))),
        (FINISHED, FinishedRequest(actuals=[to_request_actuals(actuals)])),
        (REPORT, to_worker_report(report)),
    ):
        answered = await cluster.send(path, message.SerializeToString(), wait_s=0.5)
        # No code within `wait_s`: a request waits for workers that may still report.
        assert answered.code in (OK, None), (path, answered)
    await cluster.check()


JOBS = st.one_of(values(PrefillJob), values(DecodeJob))


@settings(FUZZ, max_examples=sized(6, 60))
@given(jobs=st.lists(JOBS, min_size=1, max_size=8), in_vocabulary=st.booleans())
async def test_any_well_formed_job_ends_with_tokens_or_a_failure(
    cluster: CheckedCluster, jobs: list[PrefillJob | DecodeJob], in_vocabulary: bool
) -> None:
    gateway = Gateway(cluster.network, cluster.worker, "jobs")
    await gateway.connect()
    runnable_jobs = [runnable(job, in_vocabulary) for job in jobs]
    gateway.send(*runnable_jobs)
    await gateway.until(
        lambda: all(gateway.failures[job.job] or gateway.deltas[job.job] for job in runnable_jobs), within_s=30.0
    )
    gateway.send(*(Cancel(job=job.job, reason=Reason.CANCELLED) for job in runnable_jobs))
    assert not gateway.is_broken
    await gateway.break_off()
    await cluster.check()


NUMBERS = count()


def runnable(job: PrefillJob | DecodeJob, in_vocabulary: bool) -> PrefillJob | DecodeJob:
    """Return the job with a unique id, a deadline after its start and the current sampler version."""
    ids: TokenIds = token_ids(token % VOCAB_SIZE for token in job.token_ids) if in_vocabulary else job.token_ids
    sampling: Sampling = replace(job.sampling, sampler_version=SAMPLER_VERSION)
    return replace(
        job,
        job=JobId(request_id=b"invalid-%d" % next(NUMBERS), attempt=job.job.attempt),
        token_ids=ids,
        sampling=sampling,
        deadline_s=0.5,
    )


@FUZZ
@given(sent=st.lists(values(ReaderMessage), min_size=1, max_size=8))
async def test_owner_answers_any_well_formed_reader_messages(
    cluster: CheckedCluster, sent: list[ReaderMessage]
) -> None:
    raw = [to_reader_message(message).SerializeToString() for message in sent if not isinstance(message, PeerHello)]
    answered = await cluster.send(EXCHANGE, cluster.peer_hello(), *raw)
    assert answered.code is OK, answered
    for reply in answered.replies:
        from_owner_message(OwnerMessagePb.FromString(reply))
    await cluster.check()


async def test_owner_serves_cached_blocks_only_to_their_own_salt(cluster: CheckedCluster) -> None:
    """The blocks of the valid request are cached. The same tokens with another salt have no blocks."""
    size = cluster.layout.block_size_tokens
    for number, (salt, num_expected) in enumerate(((b"", len(GOOD_PROMPT) // size), (b"other", 0))):
        root = root_hash(model_fingerprint=cluster.layout.model_fingerprint, cache_salt=salt, block_size_tokens=size)
        subject = HashRange(hashes=tuple(chain(root, GOOD_PROMPT, size)), cache_salt=salt)
        follow = Follow(transfer_id=TransferId(5 + number), subject=subject, have_blocks=0, resume_from_block=0)
        stream_messages = (cluster.peer_hello(), to_reader_message(follow).SerializeToString())
        answered = await cluster.send(EXCHANGE, *stream_messages, keep_open=True, max_replies=2)
        ready = from_owner_message(OwnerMessagePb.FromString(answered.replies[1]))
        assert isinstance(ready, KvReady)
        assert (len(ready.block_ids), ready.final) == (num_expected, True)


# Streams with a wrong first message.


async def test_stream_with_a_wrong_first_message_is_ended(cluster: CheckedCluster) -> None:
    other_epoch = replace(cluster.worker, worker_epoch=cluster.worker.worker_epoch ^ 1)
    for message in (Ping(), Ack(seq=2**64 - 1), Cancel(job=JobId(request_id=b"x", attempt=0), reason=Reason.CANCELLED)):
        answered = await cluster.send(SESSION, to_gateway_message(message).SerializeToString())
        assert (answered.code, answered.replies) == (INVALID, ()), message
    for hello in (cluster.hello(expected=other_epoch), cluster.hello(protocol_version=99)):
        answered = await cluster.send(SESSION, hello, keep_open=True)
        (reply,) = (from_worker_message(WorkerMessagePb.FromString(raw)) for raw in answered.replies)
        assert (reply.worker, reply.resumed) == (cluster.worker, False)  # type: ignore[union-attr]
    assert (await cluster.send(SESSION, cluster.hello(), cluster.hello())).code is INVALID
    assert (await cluster.send(SESSION, cluster.hello(session_id="x" * 2**20))).code is INVALID
    follow = Follow(
        transfer_id=TransferId(1), subject=JobId(request_id=b"x", attempt=0), have_blocks=0, resume_from_block=0
    )
    for first_message, reason in (
        (to_reader_message(follow).SerializeToString(), "protocol_version"),
        (cluster.peer_hello(owner=other_epoch), "wrong_epoch"),
        (cluster.peer_hello(protocol_version=99), "protocol_version"),
        (cluster.peer_hello(layout=replace(cluster.layout, model_fingerprint="other")), "layout_mismatch"),
    ):
        answered = await cluster.send(EXCHANGE, first_message, keep_open=True)
        (refusal,) = (from_owner_message(OwnerMessagePb.FromString(raw)) for raw in answered.replies)
        assert isinstance(refusal, PeerHelloReply)
        assert refusal.refusal.startswith(reason)
        assert refusal.memory == ()
    await cluster.check()


# A worker that reads from an owner with invalid answers.

Answer = Callable[[WorkerRef], bytes]
"""Returns the answer of a false owner to a hello, given its own reference."""


@asynccontextmanager
async def false_owner(answer: Answer, number: int) -> AsyncIterator[WorkerRef]:
    async def exchange(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.send_initial_metadata(ACCEPTED)
        await context.read()
        await context.write(answer(owner))
        await asyncio.sleep(60)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(exchange)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.wire.v1.Peer", {"Exchange": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    owner = WorkerRef(worker_id=f"false-owner-{number}", worker_epoch=1, address=f"127.0.0.1:{port}")
    await server.start()
    try:
        yield owner
    finally:
        await server.stop(0)


def invalid_answers(cluster: CheckedCluster, canary: Canary) -> Iterator[Answer]:
    """Return unparsable bytes, and valid hellos that describe invalid memory."""
    for raw in (b"\xff" * 20, b"", *canary.payloads):
        yield lambda _, raw=raw: raw  # type: ignore[misc]
    valid = {
        "agent_name": "false-owner",
        "agent_metadata": b"metadata",
        "memory_kind": "dram",
        "device_id": 0,
        "base_address": 4096,
        "block_stride_bytes": cluster.layout.block_bytes,
        "num_blocks": 100,
        "generation_table_address": 2**20,
        "generation_entry_bytes": 32,
    }
    changed_fields: list[dict[str, Any]] = [
        {"agent_metadata": payload} for payload in (b"", b"\0" * 1000, *canary.payloads)
    ]
    changed_fields += [
        {"num_blocks": 2**62},
        {"block_stride_bytes": 0},
        {"generation_entry_bytes": 0},
        {"memory_kind": "\u20ac"},
    ]
    for changes in changed_fields:
        yield lambda owner, changes=changes: hello_of(cluster, owner, KvMemory(owner=owner, **(valid | changes)))  # type: ignore[misc]
    yield lambda owner: hello_of(cluster, owner)


def hello_of(cluster: CheckedCluster, owner: WorkerRef, *memory: KvMemory) -> bytes:
    reply = PeerHelloReply(owner=owner, layout=cluster.layout, memory=memory, lease_s=2.0)
    return to_owner_message(reply).SerializeToString()


async def test_job_with_an_invalid_owner_fails_and_the_worker_continues(
    cluster: CheckedCluster, tmp_path: Path
) -> None:
    canary = Canary(tmp_path)
    gateway = Gateway(cluster.network, cluster.worker, "reads")
    await gateway.connect()

    async def read_from(answer: Answer, number: int) -> None:
        async with false_owner(answer, number) as owner:
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

    await asyncio.gather(*(read_from(answer, number) for number, answer in enumerate(invalid_answers(cluster, canary))))
    await gateway.break_off()
    canary.check()
    await cluster.check()
