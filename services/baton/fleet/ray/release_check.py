"""Compares the Baton release of a Ray node with the release of this fleet.

A worker of another release would not understand the settings that this fleet sends.
"""

from collections.abc import Callable, Mapping

Release = Mapping[str, str]
"""The versions that must be equal on all nodes, by a readable name. Empty if the node has no Baton."""


def release_probe() -> Callable[[], Release]:
    """Return a function that determines the Baton release of the machine that runs it.

    Ray sends a nested function by value. So it also runs on nodes with another Baton or none.
    """

    def release() -> Release:
        from importlib import import_module

        try:
            versions = {"Baton": str(import_module("baton").__version__)}
        except (ImportError, AttributeError):
            return {}
        for what, module, name in (
            ("protocol", "baton.core.messages.jobs", "PROTOCOL_VERSION"),
            ("block hashes", "baton.core.kv.block_hash", "HASH_SCHEME"),
            ("sampler", "baton.core.kv.kv_layout", "SAMPLER_VERSION"),
        ):
            try:
                versions[what] = str(getattr(import_module(module), name))
            except (ImportError, AttributeError):
                versions[what] = "unknown"
        return versions

    return release


def release_mismatch(node: Release, fleet: Release) -> str | None:
    """Describe the first difference between two releases, or return None if they are equal."""
    if not node:
        return f"has no Baton, this fleet has {fleet['Baton']}"
    for what, version in fleet.items():
        if node.get(what) != version:
            return f"has {what} {node.get(what, 'unknown')}, this fleet has {version}"
    return None
