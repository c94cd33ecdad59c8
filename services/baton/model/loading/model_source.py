"""Resolves `--model` to a directory: the demo model, a local directory, a GGUF file, or a hub id that is
downloaded once.

A hub id with a colon names a GGUF file of a repository by a part of its name, as llama.cpp has it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_cache import gguf_directory, is_gguf
from baton.model.loading.gguf.gguf_parts import part_paths

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[2] / "demo"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<gguf>[\w.-]+))?")
_GGUF = ".gguf"
MAX_NAMED = 5
"""File names in an error message."""
_PROJECTOR = "mmproj"
"""Part of the name of a GGUF file that holds only the vision part of a model."""
_TEXTS = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
"""Excludes the second copy of the weights that some repositories hold, as pickles or under other names."""


def resolve_model(model: str, *, weights: bool = True, download: Callable[..., str] | None = None) -> Path:
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
    return _fetch(match["id"], match["revision"], [*_TEXTS, *(_WEIGHTS if weights else ())], download)


def _fetch_gguf(repo_id: str, revision: str | None, name: str, download: Callable[..., str] | None) -> Path:
    """Return the GGUF file, or the first of its parts, that has `name` in its own in any case.

    All files with `name` are downloaded before. Raises ModelError unless they are one model.
    """
    wanted = [f"*{each}*{_GGUF}" for each in dict.fromkeys((name, name.upper(), name.lower()))]
    directory = _fetch(repo_id, revision, wanted, download)
    files = [
        file
        for file in sorted(directory.rglob(f"*{_GGUF}"))
        if name.lower() in file.name.lower() and _PROJECTOR not in file.name.lower()
    ]
    models = list(dict.fromkeys(part_paths(file)[0] for file in files))
    if len(models) != 1:
        found = ", ".join(model.name for model in models[:MAX_NAMED]) or "none"
        raise ModelError(
            f"--model {repo_id}:{name}: one GGUF model of {repo_id} must have {name} in its file's name; found: "
            f"{found}. Give more of the name, as the repository's page has it"
        )
    return models[0]


def _fetch(repo_id: str, revision: str | None, wanted: list[str], download: Callable[..., str] | None) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path((download or snapshot_download)(repo_id, revision=revision, allow_patterns=wanted))
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
