"""Chooses a GGUF model among the files of a repository, by a part of its name. Imports no torch."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from baton.core.errors import ModelError
from baton.model.loading.gguf.gguf_parts import first_part

MAX_NAMED = 5
"""File names in an error message."""
_PROJECTOR = "mmproj"
"""Part of the name of a GGUF file that holds only the vision part of a model."""


def one_gguf_model(paths: Iterable[str], name: str, option: str) -> list[str]:
    """Return the files of the one GGUF model among `paths` that has `name` in its file names, in any case.

    Parts are in order.

    A name that stands alone comes first: `Q6_K` is `model-Q6_K.gguf`, and not `model-Q6_K_L.gguf`. Files of a
    projector are left out. `option`: names the choice in an error. Raises ModelError unless it is one model.
    """
    files = sorted(
        path for path in paths if path.lower().endswith(".gguf") and _PROJECTOR not in PurePosixPath(path).name.lower()
    )
    alone = re.compile(rf"(?<![a-z0-9]){re.escape(name.lower())}(?![a-z0-9_])")
    named = [path for path in files if name.lower() in PurePosixPath(path).name.lower()]
    chosen = [path for path in named if alone.search(PurePosixPath(path).name.lower())] or named
    models = list(dict.fromkeys(map(first_part, chosen)))
    if len(models) != 1:
        found = ", ".join((models or list(dict.fromkeys(map(first_part, files))))[:MAX_NAMED]) or "no GGUF file"
        raise ModelError(
            f"--model {option}: one GGUF model must have {name} in its file's name; {len(models)} have. The repository "
            f"has: {found}. Give more of the name"
        )
    return chosen
