"""Resolves `--model` to a directory: the demo model, a local directory, a GGUF file, or a hub id that is
downloaded once.

A hub id with a colon names a GGUF file of a repository by a part of its name, as llama.cpp has it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_cache import gguf_directory, is_gguf
from baton.model.loading.gguf.gguf_choice import one_gguf_model

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[2] / "demo"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<gguf>[\w.-]+))?")
_GGUF = ".gguf"
_TEXTS = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
"""Excludes the second copy of the weights that some repositories hold, as pickles or under other names."""


def resolve_model(model: str, *, weights: bool = True, download: Callable[..., Any] | None = None) -> Path:
    """Return the directory of `demo`, of a local path, or of a hub id (`owner/name`, `owner/name@revision`).

    For a GGUF file, or a hub id with a part of the name of one (`owner/name:Q4_K_M`), it is a directory in
    the cache with the file's configuration and tokenizer.

    weights: if False, a hub model's weights are not downloaded. A gateway needs only tokenizer, chat template
    and configuration. Those of a GGUF file are in the file.
    download: fetches a hub model; called like `huggingface_hub.snapshot_download`, which is the default.

    A hub id is downloaded, with a progress bar, unless it is in the cache. Token, cache directory, endpoint
    and offline mode are configured as for the hub's own tools (HF_TOKEN, HF_HOME, HF_ENDPOINT,
    HF_HUB_OFFLINE). Call this once, before any worker starts, and pass the directory to the workers. Raises
    ModelError with the remedy.
    """
    if model == DEMO:
        return DEMO_DIR
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if model and is_gguf(path):
        return gguf_directory(path)
    match = _HUB_ID.fullmatch(model)
    if match is None or path.exists() or model.startswith((".", "/", "~")) or match["id"].lower().endswith(_GGUF):
        raise ModelError(
            f"--model {model}: there is no such directory or GGUF file, "
            "and it is not a hub id such as Qwen/Qwen3-0.6B, owner/name:Q4_K_M or demo"
        )
    if match["gguf"]:
        return gguf_directory(_fetch_gguf(match["id"], match["revision"], match["gguf"], download))
    return Path(_fetch(match["id"], match["revision"], [*_TEXTS, *(_WEIGHTS if weights else ())], download))


def _fetch_gguf(repo_id: str, revision: str | None, name: str, download: Callable[..., Any] | None) -> Path:
    """Download one GGUF model whose file name has `name`, and return its file, or the first of its parts.

    Raises ModelError, before the download, unless one model has that name.
    """
    from huggingface_hub.errors import DryRunError

    try:
        listed = _fetch(repo_id, revision, [f"*{_GGUF}", f"*{_GGUF.upper()}"], download, dry_run=True)
        file_names = [file.filename for file in listed]
    except DryRunError:  # no access to the hub, or to this repository: only the cache is left
        directory = Path(_fetch(repo_id, revision, [], download))
        file_names = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    wanted = one_gguf_model(file_names, name, f"{repo_id}:{name}")
    return Path(_fetch(repo_id, revision, wanted, download)) / wanted[0]


def _fetch(
    repo_id: str, revision: str | None, wanted: list[str], download: Callable[..., Any] | None, *, dry_run: bool = False
) -> Any:
    """Call `download` for the files that match `wanted`, and return its result. With `dry_run` that is a list
    of `huggingface_hub.DryRunFileInfo`, else a directory.

    Raises ModelError with the remedy; DryRunError if a dry run has no access to the repository.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    fetch: Callable[..., Any] = download or snapshot_download
    try:
        return fetch(repo_id, revision=revision, allow_patterns=wanted, dry_run=dry_run)
    except DryRunError:
        raise
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
