"""Publishes the workers' KV block events in Redis: one stream and one snapshot per worker incarnation.

All of them together take at most a quarter of Redis' memory, so that membership can always be written. As for
decision records, a hash has the size of each stream and their sum.

Fields of a stream entry: k, kind; t, tier; s, tokens per block; h, concatenated hashes of 16 bytes.
Format of a snapshot: `HEAD` (format, tokens per block, event_seq, number of tiers), then for each tier
`TIER_HEAD` (tier number, number of hashes) and the hashes.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import Any

from redis.client import NEVER_DECODE

from baton.core.errors import StoreUnavailable
from baton.core.ids import Incarnation, WorkerRef
from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.core.kv.kv_events import MAX_EVENT_HASHES, KvEvent, KvEventKind, KvSnapshot, Tier, UnreadableEvent
from baton.runtime.logging import get_logger
from baton.store.kv_stream_window import MAX_STREAM_BYTES, KvStreamWindow
from baton.store.redis.redis_connection import RedisConnection, RedisFull
from baton.store.redis.redis_keys import Keys, kv_field

log = get_logger(__name__)

MEMORY_SHARE = 0.25
"""Part of Redis' `maxmemory` for the KV events of a cluster. Without `maxmemory` there is no limit."""
MAX_FILLED_SHARE = 0.9
"""After a refused write, a worker writes again if at most this part of `maxmemory` is then used.

The rest stays free for membership.
"""
MAX_WAIT_S = 0.5
"""Maximum time of a blocking read; must be below the timeout of the connection."""

SNAPSHOT_FORMAT = b"BKV1"
HEAD = Struct("<4sIQB")
TIER_HEAD = Struct("<BI")
TIERS = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}
_TIER_OF = {number: tier for tier, number in TIERS.items()}
_HASH = Struct(f"{HASH_BYTES}s")

_UNLIMITED = 2**53  # Lua's numbers are exact up to here

# Redis before 7 lets a script write after INFO, TIME or PTTL only if this was called first.
_MAY_WRITE = """
if redis.replicate_commands then redis.replicate_commands() end
"""

# Defines free_capacity(field, size, limit, ttl, stream prefix, snapshot prefix), which returns by how many bytes
# the sum of sizes would exceed the limit. If it would, streams that expire in less than 15 s, or in less than
# half of the time to live, are removed first: live workers renew every second, so these have probably ended.
# They are looked for at most once a second, since that asks for every stream.
# Begins with a write that a full Redis refuses, so that it refuses the whole script. It would not refuse a later
# write of a script that has written.
_FREE_CAPACITY = """
local sizes = KEYS[3]
local kind = redis.call('TYPE', sizes).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', sizes) end
redis.call('HINCRBY', sizes, ':total', 0)
local function free_capacity(field, size, limit, ttl, streams, snapshots)
  local added = size - (redis.call('HGET', sizes, field) or 0)
  local function excess() return math.max(0, redis.call('HGET', sizes, ':total') + added - limit) end
  if added <= 0 then return 0 end
  local now = tonumber(redis.call('TIME')[1])
  if excess() > 0 and now ~= tonumber(redis.call('HGET', sizes, ':looked') or 0) then
    redis.call('HSET', sizes, ':looked', now)
    for _, name in ipairs(redis.call('HKEYS', sizes)) do
      if name:sub(1, 1) ~= ':' and name ~= field and redis.call('PTTL', streams .. name) < math.min(ttl / 2, 15000) then
        redis.call('UNLINK', streams .. name, snapshots .. name)
        redis.call('HINCRBY', sizes, ':total', -redis.call('HGET', sizes, name))
        redis.call('HDEL', sizes, name)
      end
    end
  end
  return excess()
end
"""

# KEYS: stream, snapshot, sizes. ARGV: arguments of free_capacity, '1' to replace the stream, snapshot or '',
# number of the first kept event or '', then id, kind, tier, tokens per block and hashes of each event.
# Returns what free_capacity returns; if that is above 0, nothing was written.
_WRITE = (
    _MAY_WRITE
    + _FREE_CAPACITY
    + """
local field, size, ttl = ARGV[1], ARGV[2], ARGV[4]
local excess = free_capacity(field, tonumber(size), tonumber(ARGV[3]), tonumber(ttl), ARGV[5], ARGV[6])
redis.call('PEXPIRE', sizes, ttl)
if excess > 0 then return excess end
redis.call('HINCRBY', sizes, ':total', size - (redis.call('HGET', sizes, field) or 0))
redis.call('HSET', sizes, field, size)
if ARGV[7] == '1' then redis.call('UNLINK', KEYS[1]) end
local answer = 0
for i = 10, #ARGV, 5 do
  local added = redis.pcall(
    'XADD', KEYS[1], ARGV[i], 'k', ARGV[i + 1], 't', ARGV[i + 2], 's', ARGV[i + 3], 'h', ARGV[i + 4])
  if type(added) == 'table' and added.err then answer = added break end
end
if answer == 0 and ARGV[8] ~= '' then redis.call('SET', KEYS[2], ARGV[8]) end
if answer == 0 and ARGV[9] ~= '' then redis.call('XTRIM', KEYS[1], 'MINID', '~', ARGV[9]) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
return answer
"""
)

# KEYS: stream, snapshot, sizes. ARGV: arguments of free_capacity with the size that a write needs or 0, largest
# filled share. Returns the id of the last entry, or '' if a key is missing or has the wrong type; `maxmemory`;
# and the bytes that are missing for a write. A full Redis refuses it only if the keys are missing.
_RENEW = (
    _MAY_WRITE
    + """
local info = redis.pcall('INFO', 'memory')
info = type(info) == 'string' and info or ''
local max, used = tonumber(info:match('maxmemory:(%d+)') or 0), tonumber(info:match('used_memory:(%d+)') or 0)
if redis.call('TYPE', KEYS[1]).ok == 'stream' and redis.call('TYPE', KEYS[2]).ok == 'string'
    and redis.call('TYPE', KEYS[3]).ok == 'hash' and redis.call('HEXISTS', KEYS[3], ARGV[1]) == 1 then
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[4]) end
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
  return {last[1] and last[1][1] or '', max, 0}
end
"""
    + _FREE_CAPACITY
    + """
local missing, size, ttl = 0, tonumber(ARGV[2]), tonumber(ARGV[4])
if size > 0 then missing = free_capacity(ARGV[1], size, tonumber(ARGV[3]), ttl, ARGV[5], ARGV[6]) end
if size > 0 and max > 0 then missing = math.max(missing, math.ceil(used + size - max * ARGV[7])) end
redis.call('PEXPIRE', sizes, ttl)
return {'', max, missing}
"""
)

# KEYS: stream, snapshot, sizes. ARGV: field, time to live. Removes the keys. A full Redis refuses none of these
# writes, because the first one frees memory.
_FREE = """
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HINCRBY', KEYS[3], ':total', 0 - (redis.call('HGET', KEYS[3], ARGV[1]) or 0))
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
"""


class RedisKvEventFeed:
    """Implements `KvEventFeed`. Each write is one script, so a stream and its snapshot are consistent.

    If Redis is full, or the KV events of the cluster take their share, a write is refused. What the worker
    has written is then removed, except if a reset can replace it. Writes go on when there is memory.

    max_bytes: memory of the KV events of all workers of the cluster; else `MEMORY_SHARE` of `maxmemory`
    """

    def __init__(
        self,
        connection: RedisConnection,
        keys: Keys,
        *,
        max_stream_bytes: int = MAX_STREAM_BYTES,
        max_bytes: int | None = None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._max_stream_bytes = max_stream_bytes
        self._max_bytes = max_bytes
        self._limit = _UNLIMITED if max_bytes is None else max_bytes
        self._windows: dict[Incarnation, KvStreamWindow] = {}
        self._refused: dict[Incarnation, int] = {}
        """Memory that the next reset of a worker needs, if its keys were removed after a refused write."""

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
        size = self._refused.get(worker.incarnation, 0)
        arguments = *self._capacity_arguments(worker, size, ttl_s), str(MAX_FILLED_SHARE)
        last, max_memory, missing = await self._eval(_RENEW, worker, *arguments)
        if self._max_bytes is None:
            self._limit = int(int(max_memory) * MEMORY_SHARE) or _UNLIMITED
        if int(missing) > 0:
            raise StoreUnavailable(f"Redis at {self._connection.address} lacks {missing} bytes for KV events")
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
        window = None if replace else self._windows.get(worker.incarnation)
        window = window or KvStreamWindow(self._max_stream_bytes)
        self._windows[worker.incarnation] = window
        for event in events:
            window.append(event)
        if snapshot is not None:
            window.replace_snapshot(snapshot)
        first_seq = window.trim()
        entries = [(f"{event.event_seq}-0", *_values(event)) for event in events]
        arguments: list[str | bytes] = [
            *self._capacity_arguments(worker, window.num_bytes, ttl_s),
            "1" if replace else "0",
            encode_snapshot(snapshot) if snapshot is not None else "",
            f"{first_seq}-0" if first_seq is not None else "",
            *(value for entry in entries for value in entry),
        ]
        try:
            excess = int(await self._eval(_WRITE, worker, *arguments))
        except RedisFull:
            await self._free(worker, window, ttl_s)
            raise
        if excess > 0:
            if replace:  # else the reset that follows a refused event replaces the stream by a smaller one
                await self._free(worker, window, ttl_s)
            raise StoreUnavailable(
                f"KV events would take {excess} bytes more than the {self._limit} bytes for them in Redis at "
                f"{self._connection.address}; raise its maxmemory"
            )
        self._refused.pop(worker.incarnation, None)

    async def _free(self, worker: WorkerRef, window: KvStreamWindow, ttl_s: float) -> None:
        """Remove what a worker has written, because Redis refuses further writes."""
        self._refused[worker.incarnation] = window.num_bytes - window.num_event_bytes
        self._windows.pop(worker.incarnation, None)
        with suppress(StoreUnavailable):  # the caller raises the first error
            await self._eval(_FREE, worker, kv_field(worker), str(_ms(ttl_s)))

    def _capacity_arguments(self, worker: WorkerRef, size: int, ttl_s: float) -> tuple[str, ...]:
        prefixes = self._keys.kv_event_prefix, self._keys.kv_snapshot_prefix
        return kv_field(worker), str(size), str(self._limit), str(_ms(ttl_s)), *prefixes

    async def _eval(self, script: str, worker: WorkerRef, *arguments: str | bytes) -> Any:
        keys = self._keys.kv_events(worker), self._keys.kv_snapshot(worker), self._keys.kv_sizes
        return await self._connection.call(lambda redis: redis.eval(script, len(keys), *keys, *arguments))


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


def _values(event: KvEvent) -> tuple[str, str, str, bytes]:
    """Return the values of the fields k, t, s and h."""
    return event.kind.value, event.tier.value, str(event.block_size_tokens), b"".join(event.hashes)


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
