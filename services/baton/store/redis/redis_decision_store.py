"""Stores decision records in Redis as readable JSON."""

import json

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.plain_json import from_plain, to_plain
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)


MAX_RECORD_BYTES = 64 * 2**20
OVERHEAD_BYTES = 512
"""Memory that Redis needs for a record besides its text: keys, and the entries of index and sizes."""

# KEYS: the request's hash, the ids in the order of their first record, the sizes by id, the last id.
# ARGV: request id, attempt, record, lifetime in ms, largest sum of sizes, prefix of request hashes, overhead.
# Stores a record, and removes the oldest requests while the sum of sizes is too large.
_PUT = """
local id, attempt, value, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local old = redis.call('HGET', KEYS[1], attempt)
local added = #value + ARGV[7] - (old and #old + ARGV[7] or 0)
redis.call('HSET', KEYS[1], attempt, value)
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('ZADD', KEYS[2], 'NX', redis.call('HINCRBY', KEYS[3], ':next', 1), id)
redis.call('HINCRBY', KEYS[3], id, added)
local total = redis.call('HINCRBY', KEYS[3], ':total', added)
while total > tonumber(ARGV[5]) do
  local oldest = redis.call('ZPOPMIN', KEYS[2])[1]
  if not oldest then break end
  redis.call('DEL', ARGV[6] .. oldest)
  total = redis.call('HINCRBY', KEYS[3], ':total', -(redis.call('HGET', KEYS[3], oldest) or 0))
  redis.call('HDEL', KEYS[3], oldest)
end
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
redis.call('SET', KEYS[4], id, 'PX', ttl)
"""


class RedisDecisionStore:
    """Implements `DecisionStore` with one Redis hash per request and one field per attempt.

    The records of a cluster take a bounded amount of memory; the oldest are removed first.
    """

    def __init__(self, connection: RedisConnection, keys: Keys, *, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._connection = connection
        self._keys = keys
        self._max_bytes = max_bytes

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        keys, request_id = self._keys, record.request_id.hex()
        value = json.dumps(to_plain(record), separators=(",", ":"))
        names = (
            keys.decisions(record.request_id),
            keys.decision_index,
            keys.decision_sizes,
            keys.last_decision,
        )
        arguments = (
            request_id,
            str(record.attempt),
            value,
            str(max(1, round(ttl_s * 1000))),
            str(self._max_bytes),
            keys.decision_prefix,
            str(OVERHEAD_BYTES),
        )
        await self._connection.call(lambda redis: redis.eval(_PUT, len(names), *names, *arguments))

    async def get(self, request_id: bytes | None) -> tuple[DecisionRecord, ...]:
        if request_id is None:
            request_id = await self._last_request_id()
            if request_id is None:
                return ()
        key = self._keys.decisions(request_id)
        values: dict[str, str] = await self._connection.call(lambda redis: redis.hgetall(key))
        records = (_parse_record(value) for value in values.values())
        return tuple(sorted((record for record in records if record is not None), key=lambda record: record.attempt))

    async def _last_request_id(self) -> bytes | None:
        last: str | None = await self._connection.call(lambda redis: redis.get(self._keys.last_decision))
        try:
            return None if last is None else bytes.fromhex(last)
        except ValueError:
            log.warning("stored_last_decision_rejected", value=last)
            return None


def _parse_record(value: str) -> DecisionRecord | None:
    """Parse a stored record; None if no release of Baton can have written it."""
    try:
        return from_plain(DecisionRecord, json.loads(value))
    except (ValueError, RecursionError) as error:
        log.warning("stored_decision_rejected", error=str(error))
        return None
