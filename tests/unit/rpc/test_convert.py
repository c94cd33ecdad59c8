"""Conversion of core messages to protobuf bytes and back, and of invalid input."""

import math
from array import array
from typing import Any, get_args

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import Code, Reason, Refused
from baton.core.kv.block_hash import token_ids
from baton.core.messages.jobs import Ack, Cancel, GatewayMessage, RefusedJob, SessionHelloReply, Step, WorkerMessage
from baton.core.messages.peer_messages import OwnerMessage, ReaderMessage
from baton.core.request_limits import MAX_BAD_WORD_TOKENS, MAX_GRAMMAR_BYTES
from baton.rpc.mappers import common_mapper, worker_mapper
from baton.rpc.worker_rpc import WORKER_SIDE
from baton.wire.v1 import common_pb2, peer_pb2, scheduler_pb2, worker_pb2
from tests import builders
from tests.unit.rpc.conversions import CLIENT, INTERNAL, Conversion
from tests.unit.rpc.strategies import messages, values

ALL = {**INTERNAL, **CLIENT}
FUZZ = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@FUZZ
def test_core_message_is_unchanged_after_round_trip(name: str, data: st.DataObject) -> None:
    conversion = ALL[name]
    value = data.draw(values(conversion.kind))
    assert conversion.round_trip(value) == value


@pytest.mark.parametrize("union", [GatewayMessage, WorkerMessage, ReaderMessage, OwnerMessage])
def test_each_type_of_a_stream_union_has_one_oneof_field(union: Any) -> None:
    """The number of types equals the number of oneof fields, so the round-trip test covers all of them."""
    conversion = next(each for each in INTERNAL.values() if each.kind == union)
    assert len(get_args(union)) == len(conversion.message.DESCRIPTOR.oneofs_by_name["kind"].fields)


# Invalid input


def check_read_or_refused(conversion: Conversion, message: Any) -> None:
    """Check that a message gives a core value that can be sent again, or Refused with a message."""
    failure = None
    try:
        conversion.to(conversion.back(message))
    except Refused as refused:
        failure = refused.failure
    assert failure is None or (failure.code is Code.INVALID_ARGUMENT and failure.message)


@pytest.mark.parametrize("name", INTERNAL)
@given(data=st.data())
@FUZZ
def test_arbitrary_message_of_the_schema_is_read_or_refused(name: str, data: st.DataObject) -> None:
    conversion = INTERNAL[name]
    check_read_or_refused(conversion, data.draw(messages(conversion.message)))


@pytest.mark.parametrize("name", INTERNAL)
@given(data=st.data())
@FUZZ
def test_corrupted_bytes_are_read_or_refused(name: str, data: st.DataObject) -> None:
    conversion = INTERNAL[name]
    raw = bytearray(conversion.to(data.draw(values(conversion.kind))).SerializeToString())
    for place in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=4)):
        if raw:
            raw[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        message = conversion.message.FromString(bytes(raw[:cut]))
    except DecodeError:
        return
    check_read_or_refused(conversion, message)


REF = common_mapper.to_worker_ref(builders.worker_ref())
JOB = common_mapper.to_job_id(builders.job_id())


def gateway_message(**kind: Any) -> Any:
    return worker_pb2.GatewayMessage(**kind)


def job_with(**changes: Any) -> Any:
    message = worker_mapper.to_gateway_message(builders.prefill_job())
    return changed(message, message.prefill.job, changes)


def layout_with(**changes: Any) -> Any:
    reply = SessionHelloReply(worker=builders.worker_ref(), layout=builders.layout(), resumed=False, oldest_seq=0)
    message = worker_mapper.to_worker_message(reply)
    return changed(message, message.hello_reply.layout, changes)


def changed(message: Any, part: Any, changes: dict[str, Any]) -> Any:
    """Return `message` after setting these fields of its part `part`."""
    for name, value in changes.items():
        part.ClearField(name)
        if isinstance(value, list):
            getattr(part, name).extend(value)
        elif isinstance(value, Message):
            getattr(part, name).CopyFrom(value)
        else:
            setattr(part, name, value)
    return message


def ready_with(**changes: Any) -> Any:
    fields = {"transfer_id": 1, "block_ids": [1, 2], "generations": [3, 4], "hashes": bytes(32)} | changes
    return peer_pb2.OwnerMessage(ready=peer_pb2.KvReady(**fields))


@pytest.mark.parametrize(
    ("name", "message", "error"),
    [
        ("gateway", gateway_message(), "no known kind"),
        ("gateway", gateway_message(cancel=worker_pb2.Cancel(job=JOB)), "failure_reason 0 is unset or unknown"),
        (
            "gateway",
            gateway_message(cancel=worker_pb2.Cancel(job=JOB, reason=99)),
            "failure_reason 99 is unset or unknown",
        ),
        ("gateway", gateway_message(cancel=worker_pb2.Cancel(reason=1)), "request_id is missing"),
        ("gateway", gateway_message(decode=worker_pb2.DecodeJob(job=job_with().prefill.job)), "no source"),
        ("gateway", gateway_message(hello=worker_pb2.SessionHello()), "worker_id is missing"),
        ("gateway", job_with(token_ids=b"12345"), "not a multiple of 4"),
        ("gateway", job_with(token_ids=b""), "num_prompt_tokens is 3 of 0"),
        ("gateway", job_with(num_prompt_tokens=4), "num_prompt_tokens is 4 of 3"),
        ("gateway", job_with(num_prompt_tokens=0), "num_prompt_tokens is 0 of 3"),
        ("gateway", job_with(deadline_s=math.nan), "deadline_s is nan"),
        ("gateway", job_with(deadline_s=-1.0), r"deadline_s is -1\.0"),
        ("gateway", job_with(deadline_s=math.inf), "deadline_s is inf"),
        ("gateway", job_with(deadline_s=1e10), "at most 1e.09"),
        ("gateway", job_with(cache_salt=bytes(257)), "cache_salt has a length of 257"),
        ("gateway", job_with(decision_id="x" * 257), "decision_id has a length of 257"),
        ("gateway", job_with(job=common_pb2.JobId(request_id=bytes(257))), "request_id has a length of 257"),
        (
            "gateway",
            gateway_message(hello=worker_pb2.SessionHello(expected=REF, session_id="x" * 257)),
            "session_id has a length of 257",
        ),
        ("reader", peer_pb2.ReaderMessage(release=peer_pb2.Release(outcome="x" * 257)), "outcome has a length of 257"),
        (
            "worker",
            worker_pb2.WorkerMessage(step=worker_pb2.Step(deltas=[worker_pb2.TokenDelta()])),
            "request_id is missing",
        ),
        (
            "worker",
            worker_pb2.WorkerMessage(step=worker_pb2.Step(deltas=[worker_pb2.TokenDelta(job=JOB, finish=0)])),
            "finish_reason 0",
        ),
        ("worker", layout_with(block_bytes=1), "block_bytes is 1, but its layers give 1024"),
        ("worker", layout_with(block_size_tokens=0), "block_size_tokens is missing"),
        ("worker", layout_with(groups=[common_pb2.LayerGroup()] * 4097), "4097 groups of layers"),
        ("worker", layout_with(groups=[common_pb2.LayerGroup(num_layers=2**31)] * 2), "4294967296 layers"),
        ("worker", layout_with(groups=[common_pb2.LayerGroup(window=w) for w in range(17)]), "16 different windows"),
        (
            "worker",
            layout_with(groups=[common_pb2.LayerGroup(components=[common_pb2.KvComponent()] * 65)]),
            "65 components",
        ),
        ("reader", peer_pb2.ReaderMessage(follow=peer_pb2.Follow(transfer_id=1)), "neither a job nor a range"),
        (
            "reader",
            peer_pb2.ReaderMessage(follow=peer_pb2.Follow(hash_range=peer_pb2.HashRange(hashes=b"short"))),
            "not a multiple of 16",
        ),
        ("owner", ready_with(generations=[3]), "2 block_ids, 1 generations and 2 hashes"),
        ("owner", ready_with(hashes=bytes(16)), "2 block_ids, 2 generations and 1 hashes"),
        ("owner", peer_pb2.OwnerMessage(lost=peer_pb2.Lost(transfer_id=1)), "failure_reason 0"),
        ("query", scheduler_pb2.PlacementQuery(), "request_id is missing"),
        ("query", scheduler_pb2.PlacementQuery(request_id=b"x", avoid=[REF] * 1025), "avoids 1025 workers"),
        (
            "query",
            scheduler_pb2.PlacementQuery(request_id=b"x", slo=scheduler_pb2.Slo(ttft_s=math.nan)),
            "ttft_s is nan",
        ),
        (
            "report",
            scheduler_pb2.WorkerReport(worker=common_pb2.WorkerRef(worker_id="x" * 257)),
            "worker_id has a length of 257",
        ),
        (
            "report",
            scheduler_pb2.WorkerReport(worker=common_pb2.WorkerRef(worker_id="x", address="x" * 257)),
            "address has a length",
        ),
        ("actuals", scheduler_pb2.RequestActuals(outcome="x" * 257), "outcome has a length of 257"),
        ("report", scheduler_pb2.WorkerReport(worker=REF), "worker_role 0"),
        ("report", scheduler_pb2.WorkerReport(worker=REF, role=1, state=9), "worker_state 9"),
        ("command", scheduler_pb2.Command(), "command_kind 0"),
        ("failure", common_pb2.Failure(reason=1), "failure_code 0"),
        ("failure", common_pb2.Failure(code=1), "failure_reason 0"),
    ],
)
def test_error_names_the_invalid_field(name: str, message: Any, error: str) -> None:
    with pytest.raises(Refused, match=error) as refused:
        INTERNAL[name].back(message)
    assert refused.value.failure.reason is Reason.INVALID_REQUEST


def test_unknown_dtype_is_refused() -> None:
    message = layout_with()
    message.hello_reply.layout.groups[0].components[0].dtype = "int3"
    with pytest.raises(Refused, match="dtype 'int3' is unknown; known are float32"):
        worker_mapper.from_worker_message(message)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_nan_sampling_parameter_is_refused(field: str) -> None:
    message = job_with()
    setattr(message.prefill.job.sampling, field, math.nan)
    with pytest.raises(Refused, match=f"{field} is nan"):
        worker_mapper.from_gateway_message(message)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"grammar": "é" * (MAX_GRAMMAR_BYTES // 2) + "x"}, f"grammar has {MAX_GRAMMAR_BYTES + 1} bytes"),
        ({"allowed_token_ids": tuple(range(1025))}, "allowed_token_ids has 1025 items"),
        ({"bad_words": ((1,),) * 1025}, "bad_words has 1025 items"),
        ({"bad_words": ((1,), ())}, "bad_words has an entry of 0 tokens"),
        ({"bad_words": (tuple(range(MAX_BAD_WORD_TOKENS + 1)),)}, "bad_words has an entry of 65 tokens"),
    ],
)
def test_rules_beyond_their_limits_are_refused(changes: dict[str, Any], problem: str) -> None:
    job = builders.prefill_job(sampling=builders.Sampling(max_tokens=1, **changes))
    with pytest.raises(Refused, match=problem) as refused:
        INTERNAL["gateway"].round_trip(job)
    assert refused.value.failure.code is Code.INVALID_ARGUMENT


def test_invalid_job_is_refused_without_its_stream() -> None:
    job = builders.prefill_job(sampling=builders.Sampling(max_tokens=1, bad_words=((),)))
    received = WORKER_SIDE.from_wire(worker_mapper.to_gateway_message(job))
    assert isinstance(received, RefusedJob)
    assert (received.job, received.failure.code) == (job.job, Code.INVALID_ARGUMENT)
    with pytest.raises(Refused, match="request_id is missing"):
        WORKER_SIDE.from_wire(gateway_message(decode=worker_pb2.DecodeJob()))


def test_rules_at_their_limits_are_accepted() -> None:
    rules = builders.Sampling(
        max_tokens=1,
        grammar="x" * MAX_GRAMMAR_BYTES,
        allowed_token_ids=tuple(range(1024)),
        bad_words=(tuple(range(MAX_BAD_WORD_TOKENS)),) * 1024,
    )
    job = builders.prefill_job(sampling=rules)
    assert INTERNAL["gateway"].round_trip(job) == job


# Bytes on the wire


def test_token_ids_are_little_endian_on_big_endian_machines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids([1, 0x01020304])
    assert common_mapper.to_token_bytes(ids) == b"\x01\0\0\0\x04\x03\x02\x01"
    swapped = array("I", ids)
    swapped.byteswap()
    monkeypatch.setattr(common_mapper.sys, "byteorder", "big")
    assert common_mapper.to_token_bytes(swapped) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert common_mapper.from_token_bytes(b"\x01\0\0\0\x04\x03\x02\x01") == swapped


def test_unknown_fields_of_a_newer_release_are_ignored() -> None:
    raw = worker_mapper.to_gateway_message(Ack(seq=7)).SerializeToString() + b"\xfa\x3e\x03new"  # field 1007, a string
    assert worker_mapper.from_gateway_message(worker_pb2.GatewayMessage.FromString(raw)) == Ack(seq=7)


def test_unset_and_zero_are_distinct_after_round_trip() -> None:
    cancel = Cancel(job=builders.job_id(), reason=Reason.CANCELLED)
    assert INTERNAL["gateway"].round_trip(cancel) == cancel
    delta = builders.token_delta(1, 2)
    assert INTERNAL["worker"].round_trip(Step(seq=1, deltas=(delta,))).deltas[0].finish is None
    for num_logprobs in (None, 0):
        job = builders.prefill_job(sampling=builders.Sampling(max_tokens=1, num_logprobs=num_logprobs))
        assert INTERNAL["gateway"].round_trip(job).sampling.num_logprobs == num_logprobs
