"""Converts the messages of a worker session between core and protobuf.

`Step` is on the token path: every token that a gateway streams is converted here twice.
"""

from baton.core.errors import Refused, invalid
from baton.core.ids import DecisionId, JobId
from baton.core.messages.jobs import (
    Ack,
    Cancel,
    DecodeJob,
    GatewayMessage,
    Heartbeat,
    Job,
    JobFailure,
    Ping,
    PrefillJob,
    ReceivedGatewayMessage,
    RefusedJob,
    SessionHello,
    SessionHelloReply,
    Step,
    WorkerMessage,
)
from baton.core.request import NO_HINTS, SessionHints, TokenDelta
from baton.rpc.mappers import common_mapper as c
from baton.rpc.mappers.kv_mapper import from_kv_layout, to_kv_layout
from baton.rpc.mappers.message_mapping import MessageMapping, checked
from baton.rpc.mappers.sampling_mapper import from_sampling, to_sampling
from baton.wire.v1 import worker_pb2 as pb

_HINTS = MessageMapping(
    SessionHints,
    pb.SessionHints,
    dict.fromkeys(("tenant", "session"), checked(c.name))
    | dict.fromkeys(("retain_s", "next_in_s"), checked(c.seconds)),
)


def to_gateway_message(message: GatewayMessage) -> pb.GatewayMessage:
    match message:
        case PrefillJob():
            return pb.GatewayMessage(prefill=_to_prefill_job(message))
        case DecodeJob():
            return pb.GatewayMessage(decode=_to_decode_job(message))
        case Ack():
            return pb.GatewayMessage(ack=pb.Ack(seq=message.seq))
        case Ping():
            return pb.GatewayMessage(ping=pb.Ping())
        case Cancel():
            return pb.GatewayMessage(
                cancel=pb.Cancel(
                    job=c.to_job_id(message.job),
                    sample_indices=message.sample_indices,
                    reason=c.REASONS.to_wire(message.reason),
                )
            )
        case SessionHello():
            return pb.GatewayMessage(
                hello=pb.SessionHello(
                    protocol_version=message.protocol_version,
                    gateway_id=message.gateway_id,
                    session_id=message.session_id,
                    last_seq=message.last_seq,
                    expected=c.to_worker_ref(message.expected),
                )
            )


def from_gateway_message(message: pb.GatewayMessage) -> GatewayMessage:
    match message.WhichOneof("kind"):
        case "prefill":
            return _from_prefill_job(message.prefill)
        case "decode":
            return _from_decode_job(message.decode)
        case "ack":
            return Ack(seq=message.ack.seq)
        case "ping":
            return Ping()
        case "cancel":
            cancel = message.cancel
            return Cancel(
                job=c.from_job_id(cancel.job),
                sample_indices=tuple(cancel.sample_indices),
                reason=c.REASONS.from_wire(cancel.reason),
            )
        case "hello":
            hello = message.hello
            return SessionHello(
                protocol_version=hello.protocol_version,
                gateway_id=c.name(hello.gateway_id, "gateway_id"),
                session_id=c.name(hello.session_id, "session_id"),
                last_seq=hello.last_seq,
                expected=c.from_worker_ref(hello.expected),
            )
        case _:
            raise invalid("a gateway's message is of no known kind")


def received_gateway_message(message: pb.GatewayMessage) -> ReceivedGatewayMessage:
    """Convert a message for the worker. An invalid job becomes a `RefusedJob`, so that it fails alone.

    Raises Refused for all other invalid messages, and for a job without a valid id.
    """
    try:
        return from_gateway_message(message)
    except Refused as refused:
        match message.WhichOneof("kind"):
            case "prefill":
                job = message.prefill.job.job
            case "decode":
                job = message.decode.job.job
            case _:
                raise
        return RefusedJob(job=c.from_job_id(job), failure=refused.failure)


def to_worker_message(message: WorkerMessage) -> pb.WorkerMessage:
    match message:
        case Step():
            return _to_step(message)
        case Heartbeat():
            return pb.WorkerMessage(
                heartbeat=pb.Heartbeat(
                    seq=message.seq,
                    steps_done=message.steps_done,
                    step_age_s=message.step_age_s,
                    draining=message.draining,
                )
            )
        case SessionHelloReply():
            return pb.WorkerMessage(
                hello_reply=pb.SessionHelloReply(
                    protocol_version=message.protocol_version,
                    worker=c.to_worker_ref(message.worker),
                    layout=to_kv_layout(message.layout),
                    resumed=message.resumed,
                    oldest_seq=message.oldest_seq,
                )
            )


def from_worker_message(message: pb.WorkerMessage) -> WorkerMessage:
    match message.WhichOneof("kind"):
        case "step":
            step = message.step
            return Step(
                seq=step.seq,
                deltas=tuple([_from_delta(delta) for delta in step.deltas]),
                failures=tuple(
                    JobFailure(job=c.from_job_id(failed.job), failure=c.from_failure(failed.failure))
                    for failed in step.failures
                ),
            )
        case "heartbeat":
            beat = message.heartbeat
            return Heartbeat(
                seq=beat.seq,
                steps_done=beat.steps_done,
                step_age_s=c.seconds(beat.step_age_s, "step_age_s"),
                draining=beat.draining,
            )
        case "hello_reply":
            reply = message.hello_reply
            return SessionHelloReply(
                protocol_version=reply.protocol_version,
                worker=c.from_worker_ref(reply.worker),
                layout=from_kv_layout(reply.layout),
                resumed=reply.resumed,
                oldest_seq=reply.oldest_seq,
            )
        case _:
            raise invalid("a worker's message is of no known kind")


def _to_job(job: Job) -> pb.Job:
    return pb.Job(
        job=c.to_job_id(job.job),
        token_ids=c.to_token_bytes(job.token_ids),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=to_sampling(job.sampling),
        sample_indices=job.sample_indices,
        deadline_s=job.deadline_s,
        priority=job.priority,
        cache_salt=job.cache_salt,
        decision_id=job.decision_id,
        trace_context=job.trace_context,
        ttft_slo_s=job.ttft_slo_s,
        tpot_slo_s=job.tpot_slo_s,
        waited_s=job.waited_s,
        hints=_HINTS.to_wire(job.hints),
    )


def _to_prefill_job(job: PrefillJob) -> pb.PrefillJob:
    return pb.PrefillJob(
        job=_to_job(job),
        reader=None if job.reader is None else c.to_worker_ref(job.reader),
        prefix_source=None if job.prefix_source is None else c.to_prefix_source(job.prefix_source),
    )


def _to_decode_job(job: DecodeJob) -> pb.DecodeJob:
    return pb.DecodeJob(
        job=_to_job(job),
        local=pb.Local() if job.owner is None else None,
        follow=None if job.owner is None else pb.FollowOwner(owner=c.to_worker_ref(job.owner)),
        prefix_source=None if job.prefix_source is None else c.to_prefix_source(job.prefix_source),
    )


def _from_prefill_job(message: pb.PrefillJob) -> PrefillJob:
    job = message.job
    return PrefillJob(
        job=c.from_job_id(job.job),
        token_ids=c.from_token_bytes(job.token_ids),
        num_prompt_tokens=_num_prompt_tokens(job),
        sampling=from_sampling(job.sampling),
        sample_indices=tuple(job.sample_indices),
        deadline_s=c.seconds(job.deadline_s, "deadline_s"),
        priority=job.priority,
        cache_salt=c.name(job.cache_salt, "cache_salt"),
        decision_id=DecisionId(c.name(job.decision_id, "decision_id")),
        trace_context=c.name(job.trace_context, "trace_context"),
        ttft_slo_s=c.seconds(job.ttft_slo_s, "ttft_slo_s"),
        tpot_slo_s=c.seconds(job.tpot_slo_s, "tpot_slo_s"),
        waited_s=c.seconds(job.waited_s, "waited_s"),
        hints=_HINTS.from_wire(job.hints) if job.HasField("hints") else NO_HINTS,
        reader=c.from_worker_ref(message.reader) if message.HasField("reader") else None,
        prefix_source=c.from_prefix_source(message.prefix_source) if message.HasField("prefix_source") else None,
    )


def _from_decode_job(message: pb.DecodeJob) -> DecodeJob:
    source = message.WhichOneof("source")
    if source is None:
        raise invalid("a decode job names no source of its KV")
    job = message.job
    return DecodeJob(
        job=c.from_job_id(job.job),
        token_ids=c.from_token_bytes(job.token_ids),
        num_prompt_tokens=_num_prompt_tokens(job),
        sampling=from_sampling(job.sampling),
        sample_indices=tuple(job.sample_indices),
        deadline_s=c.seconds(job.deadline_s, "deadline_s"),
        priority=job.priority,
        cache_salt=c.name(job.cache_salt, "cache_salt"),
        decision_id=DecisionId(c.name(job.decision_id, "decision_id")),
        trace_context=c.name(job.trace_context, "trace_context"),
        ttft_slo_s=c.seconds(job.ttft_slo_s, "ttft_slo_s"),
        tpot_slo_s=c.seconds(job.tpot_slo_s, "tpot_slo_s"),
        waited_s=c.seconds(job.waited_s, "waited_s"),
        hints=_HINTS.from_wire(job.hints) if job.HasField("hints") else NO_HINTS,
        owner=c.from_worker_ref(message.follow.owner) if source == "follow" else None,
        prefix_source=c.from_prefix_source(message.prefix_source) if message.HasField("prefix_source") else None,
    )


def _num_prompt_tokens(job: pb.Job) -> int:
    num_tokens = len(job.token_ids) // c.TOKEN_BYTES
    if not 1 <= job.num_prompt_tokens <= num_tokens:
        raise invalid(f"num_prompt_tokens is {job.num_prompt_tokens} of {num_tokens} token_ids")
    return job.num_prompt_tokens


def _to_step(step: Step) -> pb.WorkerMessage:
    """Convert a step. Fields are set in place, because nested constructors take twice as long."""
    message = pb.WorkerMessage()
    to = message.step
    to.seq = step.seq
    add = to.deltas.add
    for delta in step.deltas:
        out = add()
        job, job_id = out.job, delta.job
        job.request_id = job_id.request_id
        job.attempt = job_id.attempt
        out.sample_index = delta.sample_index
        out.output_index = delta.output_index
        out.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            out.logprobs.extend(map(c.to_token_logprobs, delta.logprobs))
        if delta.prompt_logprobs is not None:
            out.prompt_logprobs.CopyFrom(c.to_prompt_logprobs(delta.prompt_logprobs))
        if delta.finish is not None:
            out.finish = c.FINISH_REASONS.to_wire(delta.finish)
        if delta.usage is not None:
            out.usage.CopyFrom(c.to_usage(delta.usage))
        if delta.timeline is not None:
            out.timeline.CopyFrom(c.to_leg_timeline(delta.timeline))
        if delta.is_last:
            out.is_last = True
    for failed in step.failures:
        to.failures.add(job=c.to_job_id(failed.job), failure=c.to_failure(failed.failure))
    return message


def _from_delta(message: pb.TokenDelta) -> TokenDelta:
    job = message.job
    request_id = job.request_id
    if not request_id:
        raise invalid("a delta's request_id is missing")
    has, logprobs = message.HasField, message.logprobs
    return TokenDelta(
        job=JobId(request_id=request_id, attempt=job.attempt),
        sample_index=message.sample_index,
        output_index=message.output_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple([c.from_token_logprobs(each) for each in logprobs]) if logprobs else (),
        prompt_logprobs=c.from_prompt_logprobs(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        finish=c.FINISH_REASONS.from_wire(message.finish) if has("finish") else None,
        usage=c.from_usage(message.usage) if has("usage") else None,
        timeline=c.from_leg_timeline(message.timeline) if has("timeline") else None,
        is_last=message.is_last,
    )
