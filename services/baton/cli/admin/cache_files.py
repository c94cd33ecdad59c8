"""Files of `baton cache export` and `import`: one is written as a whole or not at all, and read in parts."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

from baton.cli.admin.gateway_connection import Gateway
from baton.core.cluster.prefix_files import ExportedPrefix, ImportedPrefix
from baton.core.errors import BatonError
from baton.core.messages.prefix_messages import PART_BYTES


def prompt_body(model: str | None, prompt: str | None, prompt_file: Path | None, messages_file: Path | None) -> str:
    """Return the JSON that names the prompt to export. Raises BatonError if a file cannot be read or used.

    A file of messages has a list of them, or the body of a chat request, of which `messages` and `tools`
    count.
    """
    body: dict[str, object] = {} if model is None else {"model": model}
    if messages_file is not None:
        try:
            content = json.loads(_text(messages_file))
        except ValueError as error:
            raise BatonError(f"{messages_file} is not valid JSON: {error}") from error
        chat = content if isinstance(content, dict) else {"messages": content}
        if not isinstance(chat.get("messages"), list):
            raise BatonError(f"{messages_file} has no list of messages; it must be one, or an object with `messages`")
        body |= {name: chat[name] for name in ("messages", "tools") if name in chat}
    else:
        body["prompt"] = prompt if prompt_file is None else _text(prompt_file)
    return json.dumps(body)


async def export_to_file(gateway: Gateway, tenant: str, prompt_json: str, path: Path) -> ExportedPrefix:
    """Write an export to `path`, with mode 0600. An earlier file is replaced only by a whole one.

    Raises BatonError if the file cannot be written, or if the export ends early.
    """
    part_path = path.with_name(f"{path.name}.part")
    try:
        fd = os.open(part_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _not_written(part_path, error) from error
    found: list[ExportedPrefix] = []
    num_bytes = 0

    async def write(answer: ExportedPrefix | bytes) -> None:
        nonlocal num_bytes
        if isinstance(answer, ExportedPrefix):
            found.append(answer)
        else:
            num_bytes += file.write(answer)

    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # also if an earlier file has another mode
            await gateway.export_cache(tenant, prompt_json, write)
            file.flush()
            os.fsync(fd)
        if not found or num_bytes != found[0].num_bytes:
            raise BatonError(f"the export ended after {num_bytes} bytes; run it again")
        os.replace(part_path, path)
        _sync_directory(path.parent)
    except OSError as error:
        part_path.unlink(missing_ok=True)
        raise _not_written(path, error) from error
    except BaseException:
        part_path.unlink(missing_ok=True)
        raise
    return found[0]


async def import_from_file(gateway: Gateway, tenant: str, worker_id: str, path: Path) -> ImportedPrefix:
    """Send a file to a worker. Raises BatonError if it cannot be read."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BatonError(f"{path} cannot be read: {error.strerror}") from error

    async def parts() -> AsyncIterator[bytes]:
        while part := file.read(PART_BYTES):
            yield part

    with file:
        return await gateway.import_cache(tenant, worker_id, parts())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BatonError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _not_written(path: Path, error: OSError) -> BatonError:
    return BatonError(f"{path} cannot be written: {error.strerror}; name another file with --out")


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
