"""Lists and downloads files of the Hugging Face hub. Every failure is a ModelError that names the remedy."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from baton.core.errors import ModelError

_TIMEOUT_S = 10.0
"""Longest wait for the list of a repository's files. After that the cache counts."""


class HubClient(Protocol):
    """The functions of `huggingface_hub` that are used."""

    def snapshot_download(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Download the files that match one of the glob patterns; return their directory."""

    def model_info(self, repo_id: str, *, revision: str | None, timeout: float) -> Any:
        """Return an object whose `siblings` have the names of all files as `rfilename`.

        Unlike `list_repo_files` it does not retry, which would delay each start without a network.
        """


def _client() -> HubClient:
    """Import the hub's client, which takes long."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    return cast("HubClient", huggingface_hub)


class Hub:
    """Access to the hub and its cache.

    Token, cache directory, endpoint and offline mode are configured as for the hub's own tools (HF_TOKEN,
    HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE).
    """

    def __init__(self, client: Callable[[], HubClient] = _client) -> None:
        """`client`: called when the hub is needed."""
        self._client = client

    def download(self, repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Return the directory with the files that match one of the glob patterns; download what the cache
        lacks."""
        client = self._client()
        with _named_failures(repo_id, revision):
            return Path(client.snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))

    def download_files(self, repo_id: str, revision: str | None, names: Sequence[str]) -> Path:
        """Download the files with these names, as `download` does."""
        return self.download(repo_id, revision, [glob.escape(name) for name in names])

    def file_names(self, repo_id: str, revision: str | None) -> tuple[list[str], bool]:
        """Return the names of a repository's files, and whether they are all of them.

        Without access to the repository they are those of the cache.
        """
        client = self._client()
        try:
            found = client.model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
            return [file.rfilename for file in found.siblings], True
        except Exception:  # of many kinds; if nothing is in the cache, either, the download raises the same
            directory = self.download(repo_id, revision, [])
            return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()], False


@contextmanager
def _named_failures(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn each failure of the hub's client into a ModelError."""
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
