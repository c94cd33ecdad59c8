"""Redis client with a time limit per call and one error type; uses only commands of Redis 6.2."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from baton.core.errors import ConfigError, StoreUnavailable

T = TypeVar("T")

MAX_CONNECTIONS = 8
TIMEOUT_S = 1.0


class RedisFull(StoreUnavailable):
    """Redis has reached its `maxmemory` and refuses writes."""


class RedisConnection:
    """Redis client that connects at first use and reconnects after every failure.

    A call takes at most `timeout_s`. Failed calls are not retried, because callers write their state again at
    their next heartbeat.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Create a client without connecting. Raises ConfigError if the URL is malformed."""
        self._timeout_s = timeout_s
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": True,
            "encoding_errors": "replace",  # entries with invalid text are skipped later, and must not raise here
            "max_connections": MAX_CONNECTIONS,
            "client_name": "baton",
            "driver_info": None,  # CLIENT SETINFO is newer than 6.2
        }
        try:
            self._redis = Redis.from_url(url, **options)
        except ValueError as error:
            raise ConfigError(
                f"the Redis URL is invalid ({error}); use redis://[:PASSWORD@]HOST:PORT/DB or unix://PATH"
            ) from error
        known = self._redis.connection_pool.connection_kwargs
        self.address: str = known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"

    async def call(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        """Run `ask(client)` within the time limit.

        Raises StoreUnavailable if it fails or takes too long, and RedisFull if Redis is out of memory.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await ask(self._redis)
        except TimeoutError as error:
            raise StoreUnavailable(f"Redis at {self.address} did not answer within {self._timeout_s:g} s") from error
        except (RedisError, OSError) as error:
            # Redis 6.2 hides the kind of an error in a script, but not its name
            is_full = isinstance(error, OutOfMemoryError) or "OOM" in str(error)
            raise (RedisFull if is_full else StoreUnavailable)(f"Redis at {self.address} failed: {error}") from error
        finally:
            # redis-py sends within `asyncio.wait_for`, which loses a cancellation before Python 3.12
            if task.cancelling() > num_cancelled:
                raise asyncio.CancelledError

    async def ping(self) -> None:
        """Check that Redis answers. Raises StoreUnavailable if not."""
        await self.call(lambda redis: redis.ping())

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()
