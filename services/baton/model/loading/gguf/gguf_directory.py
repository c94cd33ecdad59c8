"""Writes what a GGUF file says of its model as the files of a Hugging Face model directory.

Gateway, scheduler and workers then read configuration, tokenizer and chat template as those of any model, and
compute the same fingerprints. `python -m baton.model.loading.gguf.gguf_directory FILE DIRECTORY` runs in a
process of its own, because the conversion imports torch and the gateway must not. It prints one line of JSON,
`{"mistyped": [...]}` or `{"problem": ...}`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import TOKENIZER_FILE
from baton.model.loading.gguf.gguf_config import LONGROPE_TENSORS, gguf_config
from baton.model.loading.gguf.gguf_file import GgufFile
from baton.model.loading.gguf.gguf_metadata import GgufMetadata
from baton.model.loading.gguf.gguf_parts import link_names, part_paths
from baton.model.loading.gguf.gguf_tokenizer import chat_templates, gguf_tokenizer, tokenizer_config
from baton.model.loading.gguf.gguf_tokens import end_token_ids, mistyped_tokens
from baton.model.loading.gguf.gguf_types import dtype_of, floats_of


def write_gguf_directory(path: Path, directory: Path) -> list[str]:
    """Write configuration, tokenizer, chat templates and links to the file's parts into an empty directory.

    path: of the file, or of any part of a split one.
    Returns the texts of the tokens whose types were wrong. The same file gives the same bytes. Raises
    ModelError if the file is damaged or not supported, OSError if the directory cannot be written.
    """
    parts = part_paths(path)
    file = GgufFile(*parts)
    metadata = GgufMetadata(file.path, file.metadata)
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    divisors = {name: _values(file, name) for name in LONGROPE_TENSORS.values() if name in shapes}
    config = gguf_config(metadata, shapes, divisors)
    if len(metadata.texts("tokenizer.ggml.tokens")) > config["vocab_size"]:
        raise ModelError(f"{path} has more tokens than rows of token_embd.weight; download or copy it again")
    config["dtype"] = dtype_of([entry.type_id for entry in file.tensors.values()])
    config["gguf_types"] = sorted({entry.type_id for entry in file.tensors.values()})
    tokenizer = gguf_tokenizer(metadata)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": end_token_ids(metadata)})
    _write_json(directory / "tokenizer_config.json", tokenizer_config(metadata))
    (directory / TOKENIZER_FILE).write_text(tokenizer.to_str(), "utf-8")
    for name, template in chat_templates(metadata).items():
        target = directory / "additional_chat_templates" / f"{name}.jinja"
        if name == "default":
            target = directory / "chat_template.jinja"
        target.parent.mkdir(exist_ok=True)
        target.write_text(template, "utf-8")
    for name, part in zip(link_names(len(parts)), parts, strict=True):
        (directory / name).symlink_to(part.resolve())
    return mistyped_tokens(metadata)


def _values(file: GgufFile, name: str) -> list[float]:
    entry = file.tensors[name]
    return cast(list[float], floats_of(file.raw(entry), entry.type_id, entry.shape).flatten().tolist())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


def main() -> None:
    """Convert the file that the command line names."""
    try:
        answer: dict[str, Any] = {"mistyped": write_gguf_directory(Path(sys.argv[1]), Path(sys.argv[2]))}
    except ModelError as error:
        answer = {"problem": str(error)}
    except OSError as error:
        answer = {"problem": f"{sys.argv[2]} cannot be written: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
