"""Reads a tokenizer: its ordinary tokens, words that are one token each, and the encoding of texts.

Requires the `tokenizers` package and a `tokenizer.json`, both only when used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.loadgen_errors import BadPlan
from loadgen.plan.plan import Vocabulary
from loadgen.plan.words import Words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NOT_TEXT = re.compile(
    r"[<\[]\W*(unused|reserved|control|extra_id|pad|unk|mask|cls|sep|bos|eos)[^\w]*[\w]*\W*[>\]]", re.IGNORECASE
)
_WORD = re.compile(r"[a-z]{2,10}")
MIN_WORDS = 32


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `tokenizer.json`, or the one in a directory. Raises BadPlan."""
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise BadPlan(f"{file}: no such file; give a model's directory or its tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise BadPlan(f"{file}: not a tokenizer ({error})") from None


def vocabulary_of(path: str | Path) -> Vocabulary:
    """Return the ordinary tokens of a tokenizer. Raises BadPlan.

    Added and special tokens, placeholders such as `<unused7>`, ids without a token, and ids beyond the
    `vocab_size` of a `config.json` in the same directory are left out.
    """
    tokenizer = load_tokenizer(path)
    added = set(tokenizer.get_added_tokens_decoder())
    limit = _model_vocab_size(Path(path))
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    ids = sorted(
        token_id
        for token, token_id in tokens.items()
        if token and token_id not in added and not _NOT_TEXT.fullmatch(token) and (limit is None or token_id < limit)
    )
    if len(ids) < 2:
        raise BadPlan(f"{path}: this tokenizer has {len(ids)} ordinary tokens; a plan needs at least 2")
    low, high = ids[0], ids[-1] + 1
    return Vocabulary(low=low, high=high, excluded=tuple(sorted(set(range(low, high)) - set(ids))))


def vocabulary_of_size(size: int, first_id: int = 1000) -> Vocabulary:
    """Return the vocabulary of a tokenizer of which only the size is known. Raises BadPlan.

    Ids below `first_id`, where many tokenizers have special ones, are left out.
    """
    if size - first_id < 2:
        raise BadPlan(
            f"a vocabulary of {size} has fewer than two ids from {first_id} on; give a lower --first-token-id"
        )
    return Vocabulary(low=first_id, high=size)


def words_of(path: str | Path) -> Words:
    """Return words that are exactly one token each between other words.

    Raises BadPlan if there are fewer than `MIN_WORDS`.
    """
    tokenizer = load_tokenizer(path)
    pieces = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    candidates = list(
        dict.fromkeys(piece[1:] for piece, _ in pieces if piece[:1] in ("Ġ", "▁", " ") and _WORD.fullmatch(piece[1:]))
    )
    for _ in range(4):  # check again after each removal, because some tokenizers depend on neighbouring words
        encoding = tokenizer.encode(" " + " ".join(candidates), add_special_tokens=False)
        pieces_of: dict[int, int] = {}
        start_of, end = {}, 0
        for position, word in enumerate(candidates):
            for character in range(end + 1, end + 1 + len(word)):
                start_of[character] = position
            end += 1 + len(word)
        for start, stop in encoding.offsets:
            for position in {start_of[character] for character in range(start, stop) if character in start_of}:
                pieces_of[position] = pieces_of.get(position, 0) + 1
        accepted = [word for position, word in enumerate(candidates) if pieces_of.get(position) == 1]
        if accepted == candidates:
            break
        candidates = accepted
    if len(candidates) < MIN_WORDS:
        raise BadPlan(
            f"{path}: only {len(candidates)} words are one token each in this tokenizer; text prompts need at "
            f"least {MIN_WORDS}"
        )
    # Some tokenizers add a space before a text; others need one in the text for its first word to be one
    # token.
    tokens_with = {lead: _num_tokens(tokenizer, [lead + word for word in candidates]) for lead in ("", " ")}
    return Words(words=tuple(candidates), lead=min(tokens_with, key=lambda lead: tokens_with[lead]))


def encoder_of(path: str | Path) -> Callable[[str], list[int]]:
    """Return a function that encodes a text without adding tokens. Raises BadPlan."""
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _num_tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))


def _model_vocab_size(path: Path) -> int | None:
    """Return `vocab_size` of the model's `config.json`, or None."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        size = json.loads(config.read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int else None
