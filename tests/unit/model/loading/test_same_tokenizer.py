"""Draft models of another tokenizer are refused, with the first difference and the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.same_tokenizer import require_same_tokenizer


def changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the demo model's tokenizer with a change."""
    description = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    change(description)
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(description))
    return directory


def swap_two_tokens(description: dict[str, Any]) -> None:
    vocab = description["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def drop_last_token(description: dict[str, Any]) -> None:
    vocab = description["model"]["vocab"]
    dropped = max(vocab, key=lambda token: vocab[token])
    del vocab[dropped]
    description["model"]["merges"] = [
        pair
        for pair in description["model"]["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split()) != dropped
    ]


def lowercase(description: dict[str, Any]) -> None:
    description["normalizer"] = {"type": "Lowercase"}


def add_token(description: dict[str, Any]) -> None:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"].append({"id": 5_000, "content": "<|extra|>", **token})


@pytest.mark.parametrize("change", [lambda description: None, add_token])
def test_equal_tokenizers_and_further_added_tokens_are_accepted(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    other = changed(tmp_path, change)
    require_same_tokenizer(DEMO_DIR, other)
    require_same_tokenizer(other, DEMO_DIR)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_two_tokens, "2 tokens have another id and 0 exist in one of them only"),
        (drop_last_token, "0 tokens have another id and 1 exist in one of them only"),
        (lowercase, "splits text otherwise .* although both have the same tokens: 'The quick brown fox '"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    for pair in ((DEMO_DIR, changed(tmp_path, change)), (tmp_path, DEMO_DIR)):
        with pytest.raises(ModelError, match=f"{message}.*give a draft model of the same family"):
            require_same_tokenizer(*pair)


def test_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: .*; save the tokenizer again"):
        require_same_tokenizer(DEMO_DIR, tmp_path)
