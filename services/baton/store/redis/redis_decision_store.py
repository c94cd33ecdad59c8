"""Stores decision records in Redis as readable JSON."""

import json

from baton.core.cluster.decision_record import DecisionRecord
from baton.core.plain_json import from_plain, to_plain
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)


class RedisDecisionStore:
    """Implements `DecisionStore` with one Redis hash per request and one field per attempt."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def put(self, record: DecisionRecord, ttl_s: float) -> None:
        key, ttl_ms = self._keys.decisions(record.request_id), max(1, round(ttl_s * 1000))
        value = json.dumps(to_plain(record), separators=(",", ":"))
        await self._connection.call(
            lambda redis: (
                redis.pipeline(transaction=True)
                .hset(key, str(record.attempt), value)
                .pexpire(key, ttl_ms)
                .set(self._keys.last_decision, record.request_id.hex(), px=ttl_ms)
                .execute()
            )
        )

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
