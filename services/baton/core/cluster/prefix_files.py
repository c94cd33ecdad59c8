"""`ExportedPrefix` and `ImportedPrefix`: the results of an export and an import of a cached prefix."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPrefix:
    """A cached prefix that a worker exports.

    num_tokens: of the prefix; the prompt has `num_prompt_tokens`
    num_bytes: of its file
    """

    worker_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPrefix:
    """The outcome of an import at a worker.

    num_tokens: of the file, that are cached now; num_cached_before of them were already
    num_file_tokens: of the file. It has more tokens if too few blocks of the worker were free.
    """

    worker_id: str
    num_tokens: int
    num_cached_before: int
    num_file_tokens: int
