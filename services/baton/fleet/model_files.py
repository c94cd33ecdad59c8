"""Resolves a model to a local directory before any worker starts, and downloads a hub id once.

The download runs in its own process, which can be killed at any time. `python -m baton.fleet.model_files
MODEL` prints one line of JSON: `{"directory": ...}`, or `{"problem": ...}` with an error text for the user.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.core.errors import ModelError
from baton.model.loading.model_source import DEMO, resolve_model
from baton.runtime.process.process import python_module, with_parent_death_signal

DOWNLOAD_COMMAND = python_module("baton.fleet.model_files")
"""The command that resolves a model. The name of the model is appended."""


async def model_directory(model: str, download_command: Sequence[str] = DOWNLOAD_COMMAND) -> str:
    """Return the directory from which every process can load `model` without the network.

    A hub id is downloaded, with a progress bar. Cancelling kills the download process: threads of the hub
    client could not be stopped. Raises ModelError.
    """
    if _is_local(model):
        return str(resolve_model(model))
    process = await asyncio.create_subprocess_exec(
        *with_parent_death_signal([*download_command, model]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must reach only this process
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise ModelError(
            f"{model} cannot be downloaded: the download process exited with {process.returncode}"
        ) from None
    if "problem" in answer:
        raise ModelError(answer["problem"])
    return str(answer["directory"])


def _is_local(model: str) -> bool:
    return model == DEMO or Path(model).expanduser().is_dir()


def main() -> None:
    """Resolve the model named on the command line."""
    try:
        answer = {"directory": str(resolve_model(sys.argv[1]))}
    except ModelError as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
