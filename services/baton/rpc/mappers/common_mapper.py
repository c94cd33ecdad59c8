"""Converts values that several internal messages share, between core and protobuf.

`to_x` converts a core value. `from_x` converts a received message. It raises Refused (INVALID_ARGUMENT),
naming the field, if the message is not valid: an enum is unset or unknown, a part is missing, a length is
wrong, or a duration is not a number. It raises nothing else.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from enum import Enum
from struct import Struct
from typing import Any, Generic, Literal, NoReturn, TypeVar

from baton.core.errors import Code, Failure, Reason, invalid
from baton.core.ids import JobId, WorkerRef
from baton.core.kv.block_hash import HASH_BYTES, BlockHash, TokenIds
from baton.core.messages.jobs import PrefixSource
from baton.core.request import FinishReason, LegTimeline, PromptLogprobs, TokenLogprobs, Usage
from baton.rpc.mappers.message_mapping import MessageMapping, checked, nested
from baton.wire.v1 import common_pb2 as pb

TOKEN_BYTES = 4
if array("I").itemsize != TOKEN_BYTES:
    raise ImportError("this platform's unsigned int is not 4 bytes: token ids cannot be sent")

MAX_NAME = 256
"""Maximum characters of a name, or bytes of an id or salt, which are stored, logged and reported."""
MAX_SECONDS = 1e9
"""Maximum duration: 30 years, which every clock and timer can add to the present time."""
MAX_AMOUNT = 1e12

_HASHES = Struct(f"{HASH_BYTES}s")

EnumT = TypeVar("EnumT", bound=Enum)
NameT = TypeVar("NameT", str, bytes)


class EnumMap(Generic[EnumT]):
    """Maps a core enum to the protobuf enum with the same member names: `X` to `FAILURE_REASON_X`.

    A member without a counterpart is a KeyError at import.
    """

    __slots__ = ("_from", "_name", "_to")

    def __init__(self, core: type[EnumT], wire: Any) -> None:
        unspecified: str = wire.Name(0)
        prefix = unspecified.removesuffix("UNSPECIFIED")
        numbers = dict(wire.items())
        self._name = unspecified
        self._to: Mapping[EnumT, Any] = {member: numbers[prefix + member.name] for member in core}
        self._from: Mapping[int, EnumT] = {number: member for member, number in self._to.items()}

    def to_wire(self, member: EnumT) -> Any:
        """Return the protobuf number of a member."""
        return self._to[member]

    def from_wire(self, number: int) -> EnumT:
        """Return the member of a protobuf number. Raises Refused if it is unset or unknown."""
        member = self._from.get(number)
        if member is None:
            raise invalid(f"{self._name.removesuffix('_UNSPECIFIED').lower()} {number} is unset or unknown")
        return member


CODES = EnumMap(Code, pb.FailureCode)
REASONS = EnumMap(Reason, pb.FailureReason)
FINISH_REASONS = EnumMap(FinishReason, pb.FinishReason)


def seconds(value: float, field: str) -> float:
    """Check a duration: a number from 0 to `MAX_SECONDS`. Raises Refused."""
    if not 0.0 <= value <= MAX_SECONDS:
        raise invalid(
            f"{field} is {value}: a duration must be a number of seconds, 0 or more, and at most {MAX_SECONDS:g}"
        )
    return value


def amount(value: float, field: str) -> float:
    """Check a mean of counts: a number from 0 to `MAX_AMOUNT`. Raises Refused."""
    if not 0.0 <= value <= MAX_AMOUNT:
        raise invalid(f"{field} is {value}: it must be a number, 0 or more, and at most {MAX_AMOUNT:g}")
    return value


def share(value: float, field: str) -> float:
    """Check a share of a whole: a number from 0 to 1. Raises Refused."""
    if not 0.0 <= value <= 1.0:
        raise invalid(f"{field} is {value}: a share must be a number from 0 to 1")
    return value


def name(value: NameT, field: str) -> NameT:
    """Check the length of a name, id or salt. Raises Refused."""
    return value if len(value) <= MAX_NAME else name_too_long(len(value), field)


def name_too_long(length: int, field: str) -> NoReturn:
    """Raise Refused for a name that is too long."""
    raise invalid(f"{field} has a length of {length}; at most {MAX_NAME} is allowed")


def to_token_bytes(token_ids: TokenIds) -> bytes:
    if sys.byteorder == "big":
        token_ids = array("I", token_ids)
        token_ids.byteswap()
    return token_ids.tobytes()


def from_token_bytes(data: bytes) -> TokenIds:
    if len(data) % TOKEN_BYTES:
        raise invalid(f"token_ids has {len(data)} bytes: not a multiple of {TOKEN_BYTES}")
    token_ids = array("I")
    token_ids.frombytes(data)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def to_hash_bytes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def from_hash_bytes(data: bytes) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise invalid(f"block hashes have {len(data)} bytes: not a multiple of {HASH_BYTES}")
    return tuple(block_hash for (block_hash,) in _HASHES.iter_unpack(data))


def to_worker_ref(ref: WorkerRef) -> pb.WorkerRef:
    return pb.WorkerRef(worker_id=ref.worker_id, worker_epoch=ref.worker_epoch, address=ref.address)


def from_worker_ref(message: pb.WorkerRef) -> WorkerRef:
    """Convert a worker reference. Raises Refused if its `worker_id` is empty."""
    if not message.worker_id:
        raise invalid("a worker's worker_id is missing")
    return WorkerRef(
        worker_id=name(message.worker_id, "worker_id"),
        worker_epoch=message.worker_epoch,
        address=name(message.address, "address"),
    )


def to_job_id(job: JobId) -> pb.JobId:
    return pb.JobId(request_id=job.request_id, attempt=job.attempt)


def from_job_id(message: pb.JobId) -> JobId:
    """Convert a job id. Raises Refused if its `request_id` is empty."""
    request_id = message.request_id
    if not request_id:
        raise invalid("a job's request_id is missing")
    return JobId(request_id=name(request_id, "request_id"), attempt=message.attempt)


def to_prefix_source(source: PrefixSource) -> pb.PrefixSource:
    return pb.PrefixSource(
        worker=to_worker_ref(source.worker),
        num_blocks=source.num_blocks,
        num_host_blocks=source.num_host_blocks,
        num_disk_blocks=source.num_disk_blocks,
    )


def from_prefix_source(message: pb.PrefixSource) -> PrefixSource:
    return PrefixSource(
        worker=from_worker_ref(message.worker),
        num_blocks=message.num_blocks,
        num_host_blocks=message.num_host_blocks,
        num_disk_blocks=message.num_disk_blocks,
    )


_FAILURE = MessageMapping(
    Failure,
    pb.Failure,
    {
        "code": nested(CODES.to_wire, CODES.from_wire),
        "reason": nested(REASONS.to_wire, REASONS.from_wire),
        "retry_after_s": checked(seconds),
        "blamed": nested(to_worker_ref, from_worker_ref, optional=True),
    },
)

to_failure, from_failure = _FAILURE.to_wire, _FAILURE.from_wire


def to_token_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def from_token_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise invalid(f"logprobs: {len(message.top_token_ids)} token ids for {len(message.top_logprobs)} values")
    return TokenLogprobs(
        logprob=message.logprob,
        top=tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)),
    )


def to_prompt_logprobs(logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        num_top=logprobs.num_top,
        chosen=_little_endian(logprobs.chosen),
        ranks=_little_endian(logprobs.ranks),
        top_token_ids=_little_endian(logprobs.top_ids),
        top_logprobs=_little_endian(logprobs.top_values),
    )


def from_prompt_logprobs(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Convert prompt logprobs. Raises Refused if the arrays do not have matching lengths."""
    num_bytes = len(message.chosen)
    lengths = (len(message.ranks), len(message.top_token_ids), len(message.top_logprobs))
    if num_bytes % 4 or lengths != (num_bytes, num_bytes * message.num_top, num_bytes * message.num_top):
        raise invalid(f"prompt_logprobs: arrays of {num_bytes} and {lengths} bytes for {message.num_top} top tokens")
    return PromptLogprobs(
        num_top=message.num_top,
        chosen=_from_little_endian("f", message.chosen),
        ranks=_from_little_endian("I", message.ranks),
        top_ids=_from_little_endian("I", message.top_token_ids),
        top_values=_from_little_endian("f", message.top_logprobs),
    )


def _little_endian(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _from_little_endian(kind: Literal["f", "I"], data: bytes) -> "array[Any]":
    values: array[Any] = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


_USAGE = MessageMapping(Usage, pb.Usage, {"num_cached_tokens": nested(dict, dict)})

to_usage, from_usage = _USAGE.to_wire, _USAGE.from_wire

_LEG = MessageMapping(LegTimeline, pb.LegTimeline, {"worker_id": checked(name), "transport": checked(name)})

to_leg_timeline, from_leg_timeline = _LEG.to_wire, _LEG.from_wire
