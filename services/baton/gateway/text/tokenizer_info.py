"""Describes a model's tokenizer for clients, from the model's own files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.gateway.text.chat_template import read_json
from baton.gateway.text.chat_templates import CONFIG_FILE, TEMPLATE_FILE

_FIELDS = (
    "tokenizer_class",
    "add_bos_token",
    "add_eos_token",
    "added_tokens_decoder",
    "additional_special_tokens",
    "bos_token",
    "chat_template",
    "clean_up_tokenization_spaces",
    "eos_token",
    "model_max_length",
    "pad_token",
    "unk_token",
)
"""Fields of `tokenizer_config.json` that clients may see. Others may name files of this machine."""


def tokenizer_info(model_dir: Path, **more: Any) -> bytes:
    """Return the description as JSON, with further fields. Raises ModelError if a file is invalid."""
    config: Mapping[str, Any] = read_json(model_dir / CONFIG_FILE)
    info = {name: config[name] for name in _FIELDS if name in config}
    template = model_dir / TEMPLATE_FILE
    if template.is_file():
        info["chat_template"] = template.read_text("utf-8")
    return json.dumps(info | more).encode()
