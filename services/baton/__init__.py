"""Baton: large language models served with prefill and decode on different workers."""

from pathlib import Path

WITHOUT_HISTORY = "0.1.0.dev0"
"""Version of a source tree that was not built, or was built without git history. See `pyproject.toml`."""


def _read_version() -> str:
    """Return the version that the build wrote. It follows from the git tags."""
    try:
        return (Path(__file__).parent / "version.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return WITHOUT_HISTORY


__version__ = _read_version()
