"""Lists and downloads files of the Hugging Face hub. Every failure is a ModelError that names the remedy."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError


def _snapshot_download(*arguments: Any, **options: Any) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(*arguments, **options)


def _list_repo_files(*arguments: Any, **options: Any) -> list[str]:
    from huggingface_hub import list_repo_files

    return list_repo_files(*arguments, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """Access to the hub and its cache.

    Token, cache directory, endpoint and offline mode are configured as for the hub's own tools (HF_TOKEN,
    HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE).

    snapshot_download, list_repo_files: the functions of `huggingface_hub`; tests replace them.
    """

    snapshot_download: Callable[..., str] = _snapshot_download
    list_repo_files: Callable[..., Sequence[str]] = _list_repo_files

    def download(self, repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Download the files that match one of the glob patterns, unless they are in the cache. Return their
        directory."""
        with _named_failures(repo_id, revision):
            return Path(self.snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))

    def download_files(self, repo_id: str, revision: str | None, names: Sequence[str]) -> Path:
        """Download the files with these names, as `download` does."""
        return self.download(repo_id, revision, [glob.escape(name) for name in names])

    def file_names(self, repo_id: str, revision: str | None) -> tuple[list[str], bool]:
        """Return the names of a repository's files, and whether they are all of them.

        Without access to the repository they are those of the cache.
        """
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            return list(self.list_repo_files(repo_id, revision=revision)), True
        except Exception:  # of many kinds; if nothing is in the cache, either, the download raises the same
            directory = self.download(repo_id, revision, [])
            return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()], False


@contextmanager
def _named_failures(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn each failure of the hub's client into a ModelError."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: accept its licence on its page, then log in with `hf auth login`, "
            "or set HF_TOKEN to that account's token"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no revision {revision!r}: give a branch, tag or commit after the @, or leave it out"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo_id}, or it is private: check the spelling; "
            "if private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo_id} is not in the cache and the hub cannot be reached: {_NETWORK_ADVICE}") from error
    # the hub's client raises many kinds of network errors, depending on its version
    except Exception as error:
        raise ModelError(
            f"{repo_id} cannot be downloaded ({type(error).__name__}: {error}): {_NETWORK_ADVICE}"
        ) from error


_NETWORK_ADVICE = (
    "check the network (HF_ENDPOINT and HTTPS_PROXY are used), "
    "or download it elsewhere with `hf download` and give --model the directory"
)
