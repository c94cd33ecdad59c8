"""Chooses a GGUF model among the files of a repository, by a part of its name. Imports no torch."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_parts import first_part

_MAX_NAMED = 5
"""File names in an error message."""
_PROJECTOR = "mmproj"
"""Part of the name of a GGUF file that holds only the vision part of a model."""


def one_gguf_model(paths: Iterable[str], name: str, *, option: str, are_all: bool = True) -> list[str]:
    """Return all files of the one GGUF model that has `name` in a file name, in any case; parts in order.

    A name that stands alone comes first: `Q6_K` is `model-Q6_K.gguf`, and not `model-Q6_K_L.gguf`. Files of a
    projector are left out.

    option: names the choice in an error.
    are_all: `paths` are all files of the repository. Else the name must stand alone, because a file that fits
    better may be missing.
    Raises ModelError unless it is one model.
    """
    files = sorted(path for path in paths if path.lower().endswith(".gguf") and _PROJECTOR not in _file_name(path))
    alone = re.compile(rf"(?<![a-z0-9]){re.escape(name.lower())}(?![a-z0-9_])")
    chosen = [path for path in files if alone.search(_file_name(path))]
    if not chosen and are_all:
        chosen = [path for path in files if name.lower() in _file_name(path)]
    models = {first_part(path) for path in chosen}
    if len(models) != 1:
        found = list(dict.fromkeys(map(first_part, chosen or files)))
        listed = ", ".join(found[:_MAX_NAMED]) + (", ..." if len(found) > _MAX_NAMED else "")
        raise ModelError(
            f"--model {option}: one GGUF model must have {name} in its file's name; {len(models)} have. "
            f"{'The repository has' if are_all else 'The repository cannot be listed; its cache has'}: "
            f"{listed or 'no GGUF file'}. Give more of the name"
        )
    return [path for path in files if first_part(path) in models]


def _file_name(path: str) -> str:
    return PurePosixPath(path).name.lower()
