"""The workers' block events in Redis: a stream a worker life, an entry an event, and beside it one value with
all that the life holds.

An entry's fields: k, the kind; t, the tier; s, tokens a block; h, the hashes, 16 bytes each without anything
between. A snapshot: `HEAD` (format, tokens a block, event_seq, number of tiers), then for each tier its
number, how many hashes, and these.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import chain
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any

from redis.client import NEVER_DECODE

from baton.core.ids import WorkerRef
from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)

MAX_STREAM_EVENTS = 8_192
"""Of one life, about: at most 64 MiB of Redis's memory, and then only if every event is full. A worker writes
snapshots much more often."""
MAX_WAIT_S = 0.5
"""Within the time in which the connection wants an answer."""

SNAPSHOT_FORMAT = b"BKV1"
HEAD = Struct("<4sIQB")
TIER_HEAD = Struct("<BI")
TIERS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}
_TIER_OF = {number: tier for tier, number in TIERS.items()}
_HASH = Struct(f"{HASH_BYTES}s")

# KEYS: stream, snapshot. ARGV: time to live. Returns the id of the last entry, or '' if one of them is not
# there, or is something else.
_RENEW = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' or redis.call('TYPE', KEYS[2]).ok ~= 'string' then return '' end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
return last[1] and last[1][1] or ''
"""


class RedisKvEventFeed:
    """Implements `KvEventFeed`. A write is one transaction: the stream and its snapshot never contradict each
    other."""

    def __init__(self, connection: RedisConnection, keys: Keys, *, max_stream_events: int = MAX_STREAM_EVENTS) -> None:
        self._connection = connection
        self._keys = keys
        self._max_stream_events = max_stream_events

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        await self._write(worker, events, ttl_s, snapshot, anew=False)

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        event = KvEvent(
            worker=snapshot.worker,
            event_seq=snapshot.event_seq,
            kind=KvEventKind.RESET,
            block_size_tokens=snapshot.block_size_tokens,
        )
        await self._write(snapshot.worker, [event], ttl_s, snapshot, anew=True)

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        stream, kept = self._keys.kv_events(worker), self._keys.kv_snapshot(worker)
        last: str = await self._connection.call(lambda redis: redis.eval(_RENEW, 2, stream, kept, str(_ms(ttl_s))))
        return _seq_of(last.encode())

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        value: bytes | None = await self._connection.call(_binary("GET", self._keys.kv_snapshot(worker)))
        if value is None:
            return None
        try:
            return decode_snapshot(worker, value)
        except ValueError as error:
            log.warning("kv_snapshot_ignored", worker=str(worker), error=str(error))
            return None

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        if not after:
            return {}
        worker_of = {self._keys.kv_events(worker).encode(): worker for worker in after}
        block_ms = max(1, round(min(wait_s, MAX_WAIT_S) * 1000))  # 0 would be for ever
        ids = [
            f"{event_seq}-{2**64 - 1}" for event_seq in after.values()
        ]  # past that number, whatever comes behind its dash
        ask = _binary("XREAD", "COUNT", max_events, "BLOCK", block_ms, "STREAMS", *worker_of, *ids)
        answer = await self._connection.call(ask)
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        return {
            (worker := worker_of[stream]): [_event(worker, entry_id, fields or {}) for entry_id, fields in entries]
            for stream, entries in streams
        }

    async def _write(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None, *, anew: bool
    ) -> None:
        stream, kept, ttl_ms = self._keys.kv_events(worker), self._keys.kv_snapshot(worker), _ms(ttl_s)
        value = encode_snapshot(snapshot) if snapshot is not None else None

        def write(redis: Any) -> Awaitable[Any]:
            pipeline = redis.pipeline(transaction=True)
            if anew:
                pipeline.delete(stream)
            for event in events:
                pipeline.xadd(
                    stream, _fields(event), id=f"{event.event_seq}-0", maxlen=self._max_stream_events, approximate=True
                )
            if value is not None:
                pipeline.set(kept, value)
            written: Awaitable[Any] = pipeline.pexpire(stream, ttl_ms).pexpire(kept, ttl_ms).execute()
            return written

        await self._connection.call(write)


def encode_snapshot(snapshot: KvSnapshot) -> bytes:
    tiers = (
        part for tier, hashes in snapshot.hashes.items() for part in (TIER_HEAD.pack(TIERS[tier], len(hashes)), *hashes)
    )
    return b"".join(
        chain(
            (HEAD.pack(SNAPSHOT_FORMAT, snapshot.block_size_tokens, snapshot.event_seq, len(snapshot.hashes)),), tiers
        )
    )


def decode_snapshot(worker: WorkerRef, value: bytes) -> KvSnapshot:
    """Tiers that a later release has written are left out. Raises ValueError for what no release of ours
    wrote."""
    try:
        format_, block_size_tokens, event_seq, num_tiers = HEAD.unpack_from(value)
        if format_ != SNAPSHOT_FORMAT:
            raise ValueError(f"it begins with {format_!r}, not {SNAPSHOT_FORMAT!r}")
        hashes: dict[Tier, tuple[BlockHash, ...]] = {}
        at = HEAD.size
        for _ in range(num_tiers):
            number, count = TIER_HEAD.unpack_from(value, at)
            at += TIER_HEAD.size
            end = at + count * HASH_BYTES
            if end > len(value):
                raise ValueError(f"it ends {end - len(value)} bytes early")
            if (tier := _TIER_OF.get(number)) is not None:
                hashes[tier] = tuple(_hashes(value[at:end]))
            at = end
        if at != len(value):
            raise ValueError(f"{len(value) - at} bytes are left over")
    except StructError as error:
        raise ValueError(str(error)) from error
    return KvSnapshot(worker=worker, event_seq=event_seq, block_size_tokens=block_size_tokens, hashes=hashes)


def _fields(event: KvEvent) -> dict[str, Any]:
    return {"k": event.kind.value, "t": event.tier.value, "s": event.block_size_tokens, "h": b"".join(event.hashes)}


def _event(worker: WorkerRef, entry_id: bytes, fields: Mapping[bytes, bytes]) -> KvEvent | UnreadableEvent:
    event_seq = _seq_of(entry_id)
    try:
        kind, tier, hashes = fields[b"k"].decode(), fields[b"t"].decode(), fields[b"h"]
        block_size_tokens = int(fields[b"s"])
    except (KeyError, ValueError) as error:
        return UnreadableEvent(worker=worker, event_seq=event_seq, problem=f"{type(error).__name__}: {error}")
    if kind not in _KINDS or tier not in _TIERS:
        return UnreadableEvent(
            worker=worker, event_seq=event_seq, problem=f"{kind} in {tier}", is_from_later_release=True
        )
    if len(hashes) % HASH_BYTES or len(hashes) > MAX_EVENT_HASHES * HASH_BYTES:
        return UnreadableEvent(worker=worker, event_seq=event_seq, problem=f"{len(hashes)} bytes of hashes")
    return KvEvent(
        worker=worker,
        event_seq=event_seq,
        kind=KvEventKind(kind),
        tier=Tier(tier),
        hashes=tuple(_hashes(hashes)),
        block_size_tokens=block_size_tokens,
    )


_KINDS = {kind.value for kind in KvEventKind}
_TIERS = {tier.value for tier in Tier}


def _hashes(value: bytes) -> Iterator[BlockHash]:
    return (block_hash for (block_hash,) in _HASH.iter_unpack(value))


def _seq_of(entry_id: bytes) -> int:
    """0 for ''. What stands behind the dash is 0, but for an entry that is not ours."""
    return int(entry_id.partition(b"-")[0] or 0)


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _binary(*command: Any) -> Callable[[Any], Awaitable[Any]]:
    """A call whose answer is bytes: the connection reads text otherwise."""
    return lambda redis: redis.execute_command(*command, **{NEVER_DECODE: True})
