"""Stores step cost models in Redis as readable JSON."""

import json

from baton.core.step_cost import StepCostModel
from baton.runtime.logging import get_logger
from baton.store.redis.redis_connection import RedisConnection
from baton.store.redis.redis_keys import Keys

log = get_logger(__name__)


class RedisCostStore:
    """Implements `CostStore`. Workers of the same kind write the same key; the last write wins."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def put(self, key: str, costs: StepCostModel, ttl_s: float) -> None:
        value, ttl_ms = json.dumps(costs.to_plain()), max(1, round(ttl_s * 1000))
        await self._connection.call(lambda redis: redis.set(self._keys.costs(key), value, px=ttl_ms))

    async def get(self, key: str) -> StepCostModel | None:
        value: str | None = await self._connection.call(lambda redis: redis.get(self._keys.costs(key)))
        if value is None:
            return None
        try:
            return StepCostModel.from_plain(json.loads(value))
        except (ValueError, RecursionError) as error:
            log.warning("stored_costs_rejected", key=key, error=str(error))
            return None
