"""Converts the messages of the peer stream between core and protobuf."""

from baton.core.errors import invalid
from baton.core.ids import JobId, ReadId, TransferId
from baton.core.messages.peer_messages import (
    Abandon,
    FirstToken,
    Follow,
    GroupMessage,
    HashRange,
    KvReady,
    Lost,
    OwnerMessage,
    PeerHello,
    PeerHelloReply,
    ReaderMessage,
    Release,
    Renew,
    Renewed,
    WillRead,
)
from baton.core.request import SessionKey
from baton.rpc.mappers import common_mapper as c
from baton.rpc.mappers.kv_mapper import from_kv_layout, from_kv_memory, to_kv_layout, to_kv_memory
from baton.wire.v1 import peer_pb2 as pb

MAX_GROUP_VALUE = 4 * 1024
"""Longest value in bytes that joins a process group. Gloo's addresses have some 200 bytes, NCCL's id 128."""


def to_reader_message(message: ReaderMessage) -> pb.ReaderMessage:
    match message:
        case Renew():
            return pb.ReaderMessage(renew=pb.Renew(renewal=message.renewal))
        case Follow():
            return pb.ReaderMessage(follow=_to_follow(message))
        case Release():
            return pb.ReaderMessage(
                release=pb.Release(
                    transfer_id=message.transfer_id,
                    outcome=message.outcome,
                    transfer_bytes=message.transfer_bytes,
                    duration_s=message.duration_s,
                )
            )
        case Abandon():
            return pb.ReaderMessage(
                abandon=pb.Abandon(transfer_id=message.transfer_id, blocks_in_doubt=message.blocks_in_doubt)
            )
        case WillRead():
            return pb.ReaderMessage(
                will_read=pb.WillRead(
                    transfer_id=message.transfer_id, read_id=message.read_id, block_ids=message.block_ids
                )
            )
        case GroupMessage():
            return pb.ReaderMessage(group=_to_group(message))
        case PeerHello():
            return pb.ReaderMessage(
                hello=pb.PeerHello(
                    protocol_version=message.protocol_version,
                    reader=c.to_worker_ref(message.reader),
                    owner=c.to_worker_ref(message.owner),
                    layout=to_kv_layout(message.layout),
                    max_regions=message.max_regions,
                    transfers=message.transfers,
                )
            )


def from_reader_message(message: pb.ReaderMessage) -> ReaderMessage:
    match message.WhichOneof("kind"):
        case "renew":
            return Renew(renewal=message.renew.renewal)
        case "follow":
            return _from_follow(message.follow)
        case "release":
            release = message.release
            return Release(
                transfer_id=TransferId(release.transfer_id),
                outcome=c.name(release.outcome, "outcome"),
                transfer_bytes=release.transfer_bytes,
                duration_s=c.seconds(release.duration_s, "duration_s"),
            )
        case "abandon":
            return Abandon(
                transfer_id=TransferId(message.abandon.transfer_id), blocks_in_doubt=message.abandon.blocks_in_doubt
            )
        case "will_read":
            will = message.will_read
            return WillRead(
                transfer_id=TransferId(will.transfer_id), read_id=ReadId(will.read_id), block_ids=tuple(will.block_ids)
            )
        case "group":
            return _from_group(message.group)
        case "hello":
            hello = message.hello
            return PeerHello(
                protocol_version=hello.protocol_version,
                reader=c.from_worker_ref(hello.reader),
                owner=c.from_worker_ref(hello.owner),
                layout=from_kv_layout(hello.layout),
                max_regions=hello.max_regions,
                transfers=tuple(c.name(transfer, "transfers") for transfer in hello.transfers),
            )
        case _:
            raise invalid("a reader's message is of no known kind")


def to_owner_message(message: OwnerMessage) -> pb.OwnerMessage:
    match message:
        case KvReady():
            return pb.OwnerMessage(ready=_to_kv_ready(message))
        case GroupMessage():
            return pb.OwnerMessage(group=_to_group(message))
        case Renewed():
            return pb.OwnerMessage(renewed=pb.Renewed(renewal=message.renewal, lost=message.lost))
        case Lost():
            return pb.OwnerMessage(
                lost=pb.Lost(transfer_id=message.transfer_id, reason=c.REASONS.to_wire(message.reason))
            )
        case PeerHelloReply():
            return pb.OwnerMessage(
                hello_reply=pb.PeerHelloReply(
                    protocol_version=message.protocol_version,
                    owner=c.to_worker_ref(message.owner),
                    layout=to_kv_layout(message.layout),
                    memory=[to_kv_memory(memory) for memory in message.memory],
                    lease_s=message.lease_s,
                    refusal=message.refusal,
                )
            )


def from_owner_message(message: pb.OwnerMessage) -> OwnerMessage:
    match message.WhichOneof("kind"):
        case "ready":
            return _from_kv_ready(message.ready)
        case "group":
            return _from_group(message.group)
        case "renewed":
            renewed = message.renewed
            return Renewed(renewal=renewed.renewal, lost=tuple(TransferId(lost) for lost in renewed.lost))
        case "lost":
            return Lost(
                transfer_id=TransferId(message.lost.transfer_id), reason=c.REASONS.from_wire(message.lost.reason)
            )
        case "hello_reply":
            reply = message.hello_reply
            return PeerHelloReply(
                protocol_version=reply.protocol_version,
                owner=c.from_worker_ref(reply.owner),
                layout=from_kv_layout(reply.layout),
                memory=tuple(from_kv_memory(memory) for memory in reply.memory),
                lease_s=c.seconds(reply.lease_s, "lease_s"),
                refusal=reply.refusal,
            )
        case _:
            raise invalid("an owner's message is of no known kind")


def _to_group(message: GroupMessage) -> pb.GroupMessage:
    return pb.GroupMessage(group=message.group, key=message.key, value=message.value)


def _from_group(message: pb.GroupMessage) -> GroupMessage:
    if len(message.value) > MAX_GROUP_VALUE:
        raise invalid(f"group: a value has {len(message.value)} bytes; at most {MAX_GROUP_VALUE} are allowed")
    return GroupMessage(group=message.group, key=c.name(message.key, "key"), value=message.value)


def _to_follow(follow: Follow) -> pb.Follow:
    message = pb.Follow(
        transfer_id=follow.transfer_id,
        have_blocks=follow.have_blocks,
        resume_from_block=follow.resume_from_block,
        trace_context=follow.trace_context,
    )
    if isinstance(follow.subject, HashRange):
        message.hash_range.hashes = c.to_hash_bytes(follow.subject.hashes)
        message.hash_range.cache_salt = follow.subject.cache_salt
        message.hash_range.reload_within_s = follow.subject.reload_within_s
        message.hash_range.SetInParent()
        if follow.subject.moving_session is not None:
            message.hash_range.moving_session.tenant, message.hash_range.moving_session.session = (
                follow.subject.moving_session
            )
    else:
        message.job.CopyFrom(c.to_job_id(follow.subject))
    return message


def _from_follow(message: pb.Follow) -> Follow:
    match message.WhichOneof("subject"):
        case "job":
            subject: JobId | HashRange = c.from_job_id(message.job)
        case "hash_range":
            subject = _from_hash_range(message.hash_range)
        case _:
            raise invalid("a follow names neither a job nor a range of hashes")
    return Follow(
        transfer_id=TransferId(message.transfer_id),
        subject=subject,
        have_blocks=message.have_blocks,
        resume_from_block=message.resume_from_block,
        trace_context=c.name(message.trace_context, "trace_context"),
    )


def _from_hash_range(message: pb.HashRange) -> HashRange:
    moving_session = None
    if message.HasField("moving_session"):
        moving_session = SessionKey(
            c.name(message.moving_session.tenant, "tenant"), c.name(message.moving_session.session, "session")
        )
    return HashRange(
        hashes=c.from_hash_bytes(message.hashes),
        cache_salt=c.name(message.cache_salt, "cache_salt"),
        moving_session=moving_session,
        reload_within_s=c.seconds(message.reload_within_s, "reload_within_s"),
    )


def _to_kv_ready(ready: KvReady) -> pb.KvReady:
    return pb.KvReady(
        transfer_id=ready.transfer_id,
        shard=ready.shard,
        first_block_index=ready.first_block_index,
        block_ids=ready.block_ids,
        generations=ready.generations,
        hashes=c.to_hash_bytes(ready.hashes),
        num_computed_tokens=ready.num_computed_tokens,
        final=ready.final,
        first_tokens=[
            pb.FirstToken(
                sample_index=first.sample_index,
                token_id=first.token_id,
                logprobs=None if first.logprobs is None else c.to_token_logprobs(first.logprobs),
                finish=None if first.finish is None else c.FINISH_REASONS.to_wire(first.finish),
                prompt_logprobs=None if first.prompt_logprobs is None else c.to_prompt_logprobs(first.prompt_logprobs),
            )
            for first in ready.first_tokens
        ],
        timeline=None if ready.timeline is None else c.to_leg_timeline(ready.timeline),
    )


def _from_kv_ready(message: pb.KvReady) -> KvReady:
    block_ids, generations, hashes = (
        tuple(message.block_ids),
        tuple(message.generations),
        c.from_hash_bytes(message.hashes),
    )
    if not len(block_ids) == len(generations) == len(hashes):
        raise invalid(f"KvReady: {len(block_ids)} block_ids, {len(generations)} generations and {len(hashes)} hashes")
    return KvReady(
        transfer_id=TransferId(message.transfer_id),
        shard=message.shard,
        first_block_index=message.first_block_index,
        block_ids=block_ids,
        generations=generations,
        hashes=hashes,
        num_computed_tokens=message.num_computed_tokens,
        final=message.final,
        first_tokens=tuple(
            FirstToken(
                sample_index=first.sample_index,
                token_id=first.token_id,
                logprobs=c.from_token_logprobs(first.logprobs) if first.HasField("logprobs") else None,
                finish=c.FINISH_REASONS.from_wire(first.finish) if first.HasField("finish") else None,
                prompt_logprobs=c.from_prompt_logprobs(first.prompt_logprobs)
                if first.HasField("prompt_logprobs")
                else None,
            )
            for first in message.first_tokens
        ),
        timeline=c.from_leg_timeline(message.timeline) if message.HasField("timeline") else None,
    )
