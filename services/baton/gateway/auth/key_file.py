"""The file of API keys on disk, which may change while a gateway runs: a Secret that Kubernetes has updated,
or `baton key new`."""

import asyncio
from functools import partial
from pathlib import Path

from baton.core.errors import ConfigError
from baton.gateway.auth.api_keys import KeyRing, Keys, parse_keys
from baton.runtime.config.config_base import read_file
from baton.runtime.logging import get_logger
from baton.runtime.process.watched_files import WatchedFiles

log = get_logger(__name__)

LOOK_S = 2.0
MAX_BYTES = 2**20


def read_keys(path: Path) -> Keys:
    """Raises ConfigError naming the file and what is wrong with it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"the file of API keys {path} is larger than {MAX_BYTES:,} bytes")
    except OSError as error:
        raise ConfigError(f"cannot read the file of API keys {path}: {error.strerror or error}") from error
    try:
        return parse_keys(read_file(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def followed_keys(path: Path) -> WatchedFiles[Keys]:
    """Raises as `read_keys`, which it does now."""
    return WatchedFiles(partial(read_keys, path), path, event="api_keys_not_read")


async def follow(followed: WatchedFiles[Keys], ring: KeyRing) -> None:
    """Give `ring` what the file says, each time that it has changed, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        if (keys := await asyncio.to_thread(followed.reload_if_changed)) is not None:
            ring.replace(keys)
            log.info("api_keys_read", num_keys=len(keys))
