"""Creates NIXL agents, without what `nixl` imports and prints besides."""

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def new_agent(name: str, backends: Sequence[str] = ("UCX",)) -> Any:
    """Create an agent without a progress thread.

    Imports NIXL, which takes a second and works on Linux only.
    """
    with _torch_left_alone():
        from nixl._api import nixl_agent, nixl_agent_config

    nixl_log = logging.getLogger("nixl")  # its own handler writes to standard output
    nixl_log.handlers.clear()
    nixl_log.setLevel(logging.WARNING)
    nixl_log.propagate = True
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=list(backends)))


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Keep `nixl` from importing torch, which takes two seconds of processor time.

    `nixl` chooses one of its builds by the CUDA version in torch's version file. If that file names none, as
    in a CPU build, it imports torch to ask again, and then takes the first of its builds that is installed.
    Meanwhile an import of torch fails, in other threads, too: workers with a model have imported it before.
    """
    if "torch" in sys.modules or not _torch_has_no_cuda():
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import raises ImportError, which `nixl` expects
    try:
        yield
    finally:
        del sys.modules["torch"]


def _torch_has_no_cuda() -> bool:
    """Return True if torch was built without CUDA, or is not installed. Does not import it.

    False if its version file cannot be read: then `nixl` shall find out.
    """
    found = find_spec("torch")
    if found is None or found.origin is None:
        return True
    try:
        version = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*= *['\"]", version, re.MULTILINE) is None
