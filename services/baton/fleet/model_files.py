"""The model's files, before any worker starts: a hub id is fetched once, by a process of its own that can be
ended at any moment.

`python -m baton.fleet.model_files MODEL` prints one line of JSON: `directory`, or the `problem` that a person
can do something about.
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

from baton.core.errors import ModelError
from baton.model.loading.model_source import DEMO, resolve_model
from baton.runtime.process.process import with_parent_death_signal


async def model_directory(model: str) -> str:
    """The directory that every process then loads without the network; its download shows a progress bar.
    Raises ModelError.

    Cancelling this ends the download, wherever it is: threads of the hub's client would have to be waited
    for.
    """
    if _is_here(model):
        return str(resolve_model(model))
    fetching = await asyncio.create_subprocess_exec(
        *with_parent_death_signal([sys.executable, "-m", "baton.fleet.model_files", model]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us alone
    )
    try:
        output, _ = await fetching.communicate()
    finally:
        if fetching.returncode is None:
            with suppress(ProcessLookupError):
                fetching.kill()
            await fetching.wait()
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        raise ModelError(
            f"{model} cannot be downloaded: the process that fetched it ended with {fetching.returncode}"
        ) from None
    if "problem" in answer:
        raise ModelError(answer["problem"])
    return str(answer["directory"])


def _is_here(model: str) -> bool:
    return model == DEMO or Path(model).expanduser().is_dir()


def main() -> None:
    """Resolve the model that the command line names."""
    try:
        answer = {"directory": str(resolve_model(sys.argv[1]))}
    except ModelError as error:
        answer = {"problem": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
