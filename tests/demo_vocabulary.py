"""The bytes of the demo model's tokens, read without the libraries that are tested."""

import json
from functools import cache

from baton.gateway.text.pre_tokens import byte_level_alphabet
from baton.model.loading.model_source import DEMO_DIR

DEMO_VOCAB_SIZE = 4096
DEMO_EOS_TOKEN_IDS = (0, 2)


@cache
def demo_tokens() -> tuple[bytes | None, ...]:
    """Return the bytes of each token id; None for the special tokens."""
    description = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    byte_of = {character: byte for byte, character in byte_level_alphabet().items()}
    tokens: list[bytes | None] = [None] * DEMO_VOCAB_SIZE
    special = {token["id"] for token in description["added_tokens"]}
    for name, token_id in description["model"]["vocab"].items():
        if token_id not in special:
            tokens[token_id] = bytes(byte_of[character] for character in name)
    return tuple(tokens)


def demo_text(token_ids: "tuple[int, ...] | list[int]") -> bytes:
    """Return the text of tokens; special tokens have none."""
    return b"".join(demo_tokens()[token_id] or b"" for token_id in token_ids)
