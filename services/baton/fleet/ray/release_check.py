"""Which Baton a node has, and whether it is ours. Workers of another one would be started with settings that
they do not know."""

from collections.abc import Callable, Mapping

Release = Mapping[str, str]
"""What has to be the same on all nodes, by its name for people; empty where there is no Baton."""


def release_probe() -> Callable[[], Release]:
    """A function that says of the machine that runs it which Baton is there. Ray sends it by value, since it
    is a function inside a function, so it also runs where the Baton is another one, or none."""

    def release() -> Release:
        from importlib import import_module

        try:
            found = {"Baton": str(import_module("baton").__version__)}
        except (ImportError, AttributeError):
            return {}
        for what, module, name in (
            ("protocol", "baton.core.messages.jobs", "PROTOCOL_VERSION"),
            ("block hashes", "baton.core.kv.block_hash", "HASH_SCHEME"),
            ("sampler", "baton.core.kv.kv_layout", "SAMPLER_VERSION"),
        ):
            try:
                found[what] = str(getattr(import_module(module), name))
            except (ImportError, AttributeError):
                found[what] = "unknown"
        return found

    return release


def why_refused(theirs: Release, ours: Release) -> str | None:
    """Why no worker of ours is started where that release is; None where it is ours."""
    if not theirs:
        return f"has no Baton, this fleet has {ours['Baton']}"
    for what, version in ours.items():
        if theirs.get(what) != version:
            return f"has {what} {theirs.get(what, 'unknown')}, this fleet has {version}"
    return None
