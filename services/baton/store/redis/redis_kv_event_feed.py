"""Publishes the workers' KV block events in Redis: one stream and one snapshot per worker incarnation.

Fields of a stream entry: k, kind; t, tier; s, tokens per block; h, concatenated hashes of 16 bytes.
Format of a snapshot: `HEAD` (format, tokens per block, event_seq, number of tiers), then for each tier
`TIER_HEAD` (tier number, number of hashes) and the hashes.
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
"""Approximate length limit of a stream: at most 64 MiB if every event has the maximum size.

Workers write a snapshot long before this limit.
"""
MAX_WAIT_S = 0.5
"""Maximum time of a blocking read; must be below the timeout of the connection."""

SNAPSHOT_FORMAT = b"BKV1"
HEAD = Struct("<4sIQB")
TIER_HEAD = Struct("<BI")
TIERS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}
_TIER_OF = {number: tier for tier, number in TIERS.items()}
_HASH = Struct(f"{HASH_BYTES}s")

# KEYS: stream, snapshot. ARGV: time to live. Returns the id of the last entry, or '' if a key is missing or
# has the wrong type.
_RENEW = """
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' or redis.call('TYPE', KEYS[2]).ok ~= 'string' then return '' end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[1]) end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
return last[1] and last[1][1] or ''
"""


class RedisKvEventFeed:
    """Implements `KvEventFeed`. Each write is a transaction, so a stream and its snapshot are consistent."""

    def __init__(self, connection: RedisConnection, keys: Keys, *, max_stream_events: int = MAX_STREAM_EVENTS) -> None:
        self._connection = connection
        self._keys = keys
        self._max_stream_events = max_stream_events

    async def publish(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None = None
    ) -> None:
        await self._write(worker, events, ttl_s, snapshot, replace=False)

    async def reset(self, snapshot: KvSnapshot, ttl_s: float) -> None:
        event = KvEvent(
            worker=snapshot.worker,
            event_seq=snapshot.event_seq,
            kind=KvEventKind.RESET,
            block_size_tokens=snapshot.block_size_tokens,
        )
        await self._write(snapshot.worker, [event], ttl_s, snapshot, replace=True)

    async def renew(self, worker: WorkerRef, ttl_s: float) -> int:
        keys = self._keys.kv_events(worker), self._keys.kv_snapshot(worker)
        last: str = await self._connection.call(lambda redis: redis.eval(_RENEW, 2, *keys, str(_ms(ttl_s))))
        return _seq_of(last.encode())

    async def snapshot(self, worker: WorkerRef) -> KvSnapshot | None:
        value: bytes | None = await self._connection.call(_binary("GET", self._keys.kv_snapshot(worker)))
        if value is None:
            return None
        try:
            return decode_snapshot(worker, value)
        except ValueError as error:
            log.warning("kv_snapshot_rejected", worker=str(worker), error=str(error))
            return None

    async def read(
        self, after: Mapping[WorkerRef, int], *, max_events: int, wait_s: float
    ) -> Mapping[WorkerRef, Sequence[KvEvent | UnreadableEvent]]:
        if not after:
            return {}
        worker_of = {self._keys.kv_events(worker).encode(): worker for worker in after}
        block_ms = max(1, round(min(wait_s, MAX_WAIT_S) * 1000))  # 0 would block without limit
        # XREAD returns entries after these ids, so the second part is the maximum
        ids = [f"{event_seq}-{2**64 - 1}" for event_seq in after.values()]
        ask = _binary("XREAD", "COUNT", max_events, "BLOCK", block_ms, "STREAMS", *worker_of, *ids)
        answer = await self._connection.call(ask)
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        return {
            (worker := worker_of[stream]): [_event(worker, entry_id, fields or {}) for entry_id, fields in entries]
            for stream, entries in streams
        }

    async def _write(
        self, worker: WorkerRef, events: Sequence[KvEvent], ttl_s: float, snapshot: KvSnapshot | None, *, replace: bool
    ) -> None:
        stream, snapshot_key, ttl_ms = self._keys.kv_events(worker), self._keys.kv_snapshot(worker), _ms(ttl_s)
        value = encode_snapshot(snapshot) if snapshot is not None else None

        def write(redis: Any) -> Awaitable[Any]:
            pipeline = redis.pipeline(transaction=True)
            if replace:
                pipeline.delete(stream)
            for event in events:
                pipeline.xadd(
                    stream, _fields(event), id=f"{event.event_seq}-0", maxlen=self._max_stream_events, approximate=True
                )
            if value is not None:
                pipeline.set(snapshot_key, value)
            written: Awaitable[Any] = pipeline.pexpire(stream, ttl_ms).pexpire(snapshot_key, ttl_ms).execute()
            return written

        await self._connection.call(write)


def encode_snapshot(snapshot: KvSnapshot) -> bytes:
    """Serialize a snapshot in the format described at the top of this module."""
    head = HEAD.pack(SNAPSHOT_FORMAT, snapshot.block_size_tokens, snapshot.event_seq, len(snapshot.hashes))
    tiers = (
        item for tier, hashes in snapshot.hashes.items() for item in (TIER_HEAD.pack(TIERS[tier], len(hashes)), *hashes)
    )
    return b"".join(chain((head,), tiers))


def decode_snapshot(worker: WorkerRef, value: bytes) -> KvSnapshot:
    """Deserialize a snapshot. Tiers that this release does not know are skipped.

    Raises ValueError if no release of Baton can have written `value`.
    """
    try:
        format_, block_size_tokens, event_seq, num_tiers = HEAD.unpack_from(value)
        if format_ != SNAPSHOT_FORMAT:
            raise ValueError(f"the snapshot begins with {format_!r}, not {SNAPSHOT_FORMAT!r}")
        hashes: dict[Tier, tuple[BlockHash, ...]] = {}
        at = HEAD.size
        for _ in range(num_tiers):
            number, count = TIER_HEAD.unpack_from(value, at)
            at += TIER_HEAD.size
            end = at + count * HASH_BYTES
            if end > len(value):
                raise ValueError(f"the snapshot is {end - len(value)} bytes too short")
            if (tier := _TIER_OF.get(number)) is not None:
                hashes[tier] = tuple(_hashes(value[at:end]))
            at = end
        if at != len(value):
            raise ValueError(f"the snapshot is {len(value) - at} bytes too long")
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
    """Return the event number of an entry id, or 0 for ''. Baton's entries have 0 after the dash."""
    return int(entry_id.partition(b"-")[0] or 0)


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _binary(*command: Any) -> Callable[[Any], Awaitable[Any]]:
    """Return a call that yields bytes instead of decoded text."""
    return lambda redis: redis.execute_command(*command, **{NEVER_DECODE: True})
