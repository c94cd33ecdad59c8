"""From what `--model` says to a directory of files: the demo model, a directory, or a hub id that is fetched
once."""

import os
import re
from pathlib import Path

from baton.core.errors import ModelError

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[2] / "demo"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
_TEXTS = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
"""Some repositories hold the weights a second time, as pickles or under other names."""


def resolve_model(model: str, *, weights: bool = True) -> Path:
    """The directory of `demo`, of a directory's path, or of a hub id (`owner/name`, `owner/name@revision`).
    Without `weights` a hub's are left where they are: tokenizer, chat template and configuration are all that
    a gateway reads.

    A hub id is downloaded, with a progress bar, unless the cache has it; token, cache directory, endpoint and
    offline mode are those of the hub's own tools (HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE). Call it
    once, before any worker starts, and give the workers the directory. Raises ModelError saying what to do.
    """
    if model == DEMO:
        return DEMO_DIR
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    match = _HUB_ID.fullmatch(model)
    if match is None or path.exists() or model.startswith((".", "/", "~")):
        raise ModelError(
            f"--model {model}: there is no such directory, and it is not a hub id such as Qwen/Qwen3-0.6B or demo"
        )
    return _fetch(match["id"], match["revision"], [*_TEXTS, *(_WEIGHTS if weights else ())])


def _fetch(repo_id: str, revision: str | None, wanted: list[str]) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=wanted))
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated: accept its licence on its page, then log in with `hf auth login`, or set HF_TOKEN to that account's token"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no revision {revision!r}: give a branch, tag or commit after the @, or leave it out"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo_id}, or it is private: check the spelling; if private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{repo_id} is not in the cache and the hub cannot be reached: {_NETWORK_ADVICE}") from error
    except Exception as error:  # the hub's client lets many kinds of network errors through, by versions different ones
        raise ModelError(
            f"{repo_id} cannot be downloaded ({type(error).__name__}: {error}): {_NETWORK_ADVICE}"
        ) from error


_NETWORK_ADVICE = "check the network (HF_ENDPOINT and HTTPS_PROXY are used), or download it elsewhere with `hf download` and give --model the directory"
