"""Builds worker settings for benchmarks that open an engine in their own process."""

from typing import Any

from baton.runtime.config.settings import WorkerConfig


def worker_config(**settings: Any) -> WorkerConfig:
    """Return the default worker settings with `settings` in place.

    A direct call with some of the settings is an error for mypy: it does not see a config class's defaults.
    """
    return WorkerConfig(**settings)
