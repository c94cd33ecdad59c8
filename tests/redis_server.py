"""A real Redis server for tests, the same program that `baton up` starts."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from baton.runtime.process.process import with_parent_death_signal
from baton.store.redis.private_redis import RedisCommand, redis_command


@contextmanager
def running_redis(**options: object) -> Iterator["RunningRedis"]:
    with TemporaryDirectory(prefix="bt-redis-", dir="/tmp") as directory:
        server = RunningRedis(redis_command(Path(directory) / "redis", **options))  # type: ignore[arg-type]
        try:
            yield server
        finally:
            server.kill()


class RunningRedis:
    """A server process that tests can kill, pause and restart. A restart loses all data."""

    def __init__(self, command: RedisCommand) -> None:
        self._command = command
        self.url = command.url
        self.start()

    def start(self) -> None:
        with self._command.log_file.open("ab") as output:
            self.process = subprocess.Popen(with_parent_death_signal(self._command.argv), stdout=output, stderr=output)
        for _ in range(3000):
            assert self.process.poll() is None, self._command.log_tail()
            with suppress(redis.ConnectionError), redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
                client.ping()
                return
            time.sleep(0.02)
        raise AssertionError(f"no answer: {self._command.log_tail()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
