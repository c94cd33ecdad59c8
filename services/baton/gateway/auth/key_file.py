"""Reads the API key file, and reads it again when it changes while a gateway runs.

It changes when Kubernetes updates a Secret or when someone runs `baton key new`.
"""

import asyncio
from functools import partial
from pathlib import Path

from baton.core.errors import ConfigError
from baton.gateway.auth.api_keys import KeyRing, Keys, parse_keys
from baton.runtime.config.config_base import read_file
from baton.runtime.logging import get_logger
from baton.runtime.process.watched_files import WatchedFiles

log = get_logger(__name__)

CHECK_INTERVAL_S = 2.0
"""Interval at which the file is checked for changes."""
MAX_BYTES = 2**20


def read_keys(path: Path) -> Keys:
    """Read and parse a key file. Raises ConfigError that names the file and the problem."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(f"the API key file {path} has {size:,} bytes; at most {MAX_BYTES:,} are allowed")
    except OSError as error:
        raise ConfigError(f"cannot read the API key file {path}: {error.strerror or error}") from error
    try:
        return parse_keys(read_file(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def watch_key_file(path: Path) -> WatchedFiles[Keys]:
    """Read a key file now, and return an object that can read it again. Raises ConfigError as `read_keys`
    does."""
    return WatchedFiles(partial(read_keys, path), path, event="api_keys_not_read")


async def reload_keys(key_file: WatchedFiles[Keys], keys: KeyRing, interval_s: float = CHECK_INTERVAL_S) -> None:
    """Update `keys` whenever the file has changed, until cancelled."""
    while True:
        await asyncio.sleep(interval_s)
        if (changed := await asyncio.to_thread(key_file.reload_if_changed)) is not None:
            keys.replace(changed)
            log.info("api_keys_read", num_keys=len(changed))
