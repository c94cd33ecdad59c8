"""Refuses settings of torch's GPU allocator with which NIXL cannot register KV memory well.

NIXL registers the KV cache once, by address and size. UCX can then map it in another process only if it is
one allocation of `cudaMalloc`. With `expandable_segments` torch reserves addresses and maps pieces of memory
behind them. Registration succeeds, but reads go over a slow path or fail (ai-dynamo/nixl#1754).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.core.errors import ConfigError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch reads, of which it takes the first that is set. Which ones depends on its version, so
each must be harmless."""
OPTION = "expandable_segments"
REMEDY = "remove it, or use --transfer local on a single machine, which stages KV through host memory"


def require_plain_segments(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable of torch's allocator turns on `expandable_segments`."""
    for name in VARIABLES:
        value = expandable_segments(environ.get(name, ""))
        if value not in ("", "False"):
            raise ConfigError(
                f"{name} sets {OPTION}:{value}; KV memory that NIXL registers must be one allocation of cudaMalloc: "
                f"{REMEDY}"
            )


def expandable_segments(text: str) -> str:
    """Return the value of the option in the text of a variable; empty if it is not set.

    torch ignores blanks everywhere, separates options by commas and values by colons, and takes the last
    value of an option. Lists in brackets belong to other options.
    """
    found = ""
    depth = 0
    option = ""
    for char in "".join(text.split()) + ",":
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            name, _, value = option.partition(":")
            found = value if name == OPTION else found
            option = ""
        else:
            option += char
    return found


def require_plain_memory(segments: Iterable[Mapping[str, Any]], address: int) -> None:
    """Raise ConfigError if the allocation at `address` is in an expandable segment.

    segments: from `torch.cuda.memory_snapshot()`. Code that runs in the process can set the option, too.
    """
    for segment in segments:
        begin, size = int(segment["address"]), int(segment["total_size"])
        if begin <= address < begin + size and segment.get("is_expandable", False):
            raise ConfigError(
                f"torch has allocated KV memory in an expandable segment, although no variable asks for it; it must be "
                f"one allocation of cudaMalloc: do not set {OPTION} in the worker's process, or use --transfer local"
            )
