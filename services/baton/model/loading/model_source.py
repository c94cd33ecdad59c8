"""Resolves `--model` to a directory: the demo model, a local directory, a GGUF file, or a hub id that is
downloaded once.

A hub id with a colon names a GGUF file of a repository by a part of its name, as llama.cpp has it.
"""

import re
from pathlib import Path

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_cache import gguf_directory, is_gguf
from baton.model.loading.gguf.gguf_choice import one_gguf_model
from baton.model.loading.hub import Hub

DEMO = "demo"
DEMO_DIR = Path(__file__).parents[2] / "demo"
_HUB_ID = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<gguf>[\w.-]+))?")
_GGUF = ".gguf"
DEFAULT_HUB = Hub()
_TEXTS = ["*.json", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
"""Excludes the second copy of the weights that some repositories hold, as pickles or under other names."""


def resolve_model(model: str, *, weights: bool = True, hub: Hub = DEFAULT_HUB) -> Path:
    """Return the directory of `demo`, of a local path, or of a hub id (`owner/name`, `owner/name@revision`).

    For a GGUF file, or a hub id with a part of the name of one (`owner/name:Q4_K_M`), it is a directory in
    the cache with the file's configuration and tokenizer.

    weights: if False, a hub model's weights are not downloaded. A gateway needs only tokenizer, chat template
    and configuration. Those of a GGUF file are in the file.
    hub: where hub ids are looked up.

    A hub id is downloaded, with a progress bar, unless it is in the cache. Call this once, before any worker
    starts, and pass the directory to the workers. Raises ModelError with the remedy.
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
        return gguf_directory(_download_gguf(match["id"], match["revision"], match["gguf"], hub))
    return hub.download(match["id"], match["revision"], [*_TEXTS, *(_WEIGHTS if weights else ())])


def _download_gguf(repo_id: str, revision: str | None, name: str, hub: Hub) -> Path:
    """Download one GGUF model whose file name has `name`, and return its file, or the first of its parts.

    Raises ModelError, before the download, unless one model has that name.
    """
    names, are_all = hub.file_names(repo_id, revision)
    wanted = one_gguf_model(names, name, option=f"{repo_id}:{name}", are_all=are_all)
    return hub.download_files(repo_id, revision, wanted) / wanted[0]
