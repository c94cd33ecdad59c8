"""The file of API keys on disk, which may change while a gateway runs: a Secret that Kubernetes has updated, or `baton key new`."""

import asyncio
from pathlib import Path

from baton.core.errors import ConfigError
from baton.gateway.keys import KeyFile, KeyRing, parse_keys
from baton.runtime.config import read_file
from baton.runtime.files import Version, version_of
from baton.runtime.logging import get_logger

log = get_logger(__name__)

LOOK_S = 2.0
MAX_BYTES = 2**20


def read_keys(path: Path) -> KeyFile:
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


async def follow(path: Path, ring: KeyRing, last: Version | None) -> None:
    """Give `ring` what the file says, each time that it has changed since the version `last`, for ever. A file that cannot be read changes
    nothing, and is tried again at each look."""
    told: Version | None = None
    while True:
        await asyncio.sleep(LOOK_S)
        now = await asyncio.to_thread(version_of, path)
        if now == last:
            continue
        try:
            file = await asyncio.to_thread(read_keys, path)
        except ConfigError as error:
            if told != now:
                log.warning("api_keys_not_read", problem=str(error), hint="the keys from before stay, removed ones, too")
            told = now
            continue
        ring.replace(file)
        last = now
        log.info("api_keys_read", num_keys=len(file.identities))
