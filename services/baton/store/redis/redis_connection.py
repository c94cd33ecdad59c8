"""The connection to Redis: bounded in time, with one error for everything that can go wrong. Commands are
those of Redis 6.2."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from baton.core.errors import ConfigError, StoreUnavailable

T = TypeVar("T")

MAX_CONNECTIONS = 8
TIMEOUT_S = 1.0


class RedisConnection:
    """Connects when first used, and again after every failure. A call takes at most `timeout_s`, whatever
    Redis does; nothing is repeated: what a caller lost it says again at its next heartbeat."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises ConfigError for a URL that is none."""
        self._timeout_s = timeout_s
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",  # foreign bytes are somebody's mistake, to be skipped, not raised
            "max_connections": MAX_CONNECTIONS,
            "client_name": "baton",
            "driver_info": None,  # CLIENT SETINFO is newer than 6.2
        }
        try:
            self._redis = Redis.from_url(url, **options)
        except ValueError as error:
            raise ConfigError(
                f"the Redis URL cannot be used ({error}); it has the form redis://[:PASSWORD@]HOST:PORT/DB or unix://PATH"
            ) from error
        known = self._redis.connection_pool.connection_kwargs
        self.where: str = known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"

    async def call(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """`ask(client)` within the bound. Raises StoreUnavailable."""
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await ask(self._redis)
        except TimeoutError as error:
            raise StoreUnavailable(f"Redis at {self.where} did not answer within {self._timeout_s:g} s") from error
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {self.where} cannot be used: {error}") from error
        finally:
            if (
                task.cancelling() > num_cancelled
            ):  # redis-py sends within `asyncio.wait_for`, which loses a cancellation before Python 3.12
                raise asyncio.CancelledError

    async def ping(self) -> None:
        """Raises StoreUnavailable."""
        await self.call(lambda redis: redis.ping())

    async def aclose(self) -> None:
        await self._redis.aclose()
