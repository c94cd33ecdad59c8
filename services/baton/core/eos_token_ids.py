"""The token ids with which a model ends a text."""

import json
from pathlib import Path

from baton.core.errors import ModelError

_FILES = ("generation_config.json", "config.json")


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the token ids that end a text, from generation_config.json, else from config.json.

    Raises ModelError if a file is not readable, or if its value is not token ids.
    """
    for path in (model_dir / name for name in _FILES):
        try:
            content = json.loads(path.read_text())
            value = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download or copy it again") from error
        if value is None:
            continue
        found = tuple(value) if isinstance(value, list) else (value,)
        if not all(type(each) is int for each in found):
            raise ModelError(f"eos_token_id in {path} is {value!r}; must be a token id or a list of them")
        return found
    return ()
