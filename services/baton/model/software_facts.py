"""Collects what a verdict that is kept depends on of the software: libraries and this package's sources."""

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from baton import __version__

SOURCES = Path(__file__).parent
"""The package `model`: attention, backends, kernels, step and verification."""
PYTHON = (".py",)
PYTHON_AND_CPP = (".py", ".cpp", ".h")
"""Suffixes of the sources that a verdict depends on: without and with the kernels of CPUs."""
_LIBRARIES = ("torch", "triton", "transformers")


@cache
def software_facts(suffixes: tuple[str, ...] = PYTHON) -> Mapping[str, str]:
    """Return the versions of Baton and of the libraries that compile kernels, and a hash of this package's
    sources."""
    libraries = {name: _version(name) for name in _LIBRARIES}
    source = source_hash(SOURCES, suffixes)
    return {"baton": __version__, **libraries, "cuda": str(torch.version.cuda), "source": source}


def source_hash(directory: Path, suffixes: tuple[str, ...]) -> str:
    """Return a hash of all files below a directory with one of the suffixes, with their names."""
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in directory.rglob("*") if path.suffix in suffixes):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(directory)} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
