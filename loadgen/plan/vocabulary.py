"""What a tokenizer can say: token ids that are safe to send, words that are one token each, and tokens of a
text.

Needs `tokenizers` and a `tokenizer.json`, both looked for only when asked.
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
    """From a `tokenizer.json`, or the directory that holds one. Raises BadPlan."""
    from tokenizers import Tokenizer

    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise BadPlan(f"{file}: there is no such file: give a model's directory, or its tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise BadPlan(f"{file}: not a tokenizer ({error})") from None


def vocabulary_of(path: str | Path) -> Vocabulary:
    """The ordinary tokens of a tokenizer: no added or special ones, no placeholders such as `<unused7>`, no
    ids without a token, and none beyond the `vocab_size` of a `config.json` beside it. Raises BadPlan."""
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
        raise BadPlan(f"{path}: this tokenizer has {len(ids)} ordinary tokens: too few for a plan")
    low, high = ids[0], ids[-1] + 1
    return Vocabulary(low=low, high=high, excluded=tuple(sorted(set(range(low, high)) - set(ids))))


def vocabulary_of_size(size: int, first_id: int = 1000) -> Vocabulary:
    """Of a tokenizer of which only the number of ordinary tokens is known; the ids below `first_id` are left
    out, where many keep special ones. Raises BadPlan."""
    if size - first_id < 2:
        raise BadPlan(f"a vocabulary of {size} has no two ids from {first_id} on: give the lowest ordinary id, too")
    return Vocabulary(low=first_id, high=size)


def words_of(path: str | Path) -> Words:
    """Words of which this tokenizer makes exactly one token each wherever they stand between others. Raises
    BadPlan if there are fewer than `MIN_WORDS`."""
    tokenizer = load_tokenizer(path)
    pieces = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    candidates = list(
        dict.fromkeys(piece[1:] for piece, _ in pieces if piece[:1] in ("Ġ", "▁", " ") and _WORD.fullmatch(piece[1:]))
    )
    for _ in range(4):  # what is left once the others are gone is looked at again: neighbours matter to some tokenizers
        encoding = tokenizer.encode(" " + " ".join(candidates), add_special_tokens=False)
        touching: dict[int, int] = {}
        start_of, end = {}, 0
        for position, word in enumerate(candidates):
            for character in range(end + 1, end + 1 + len(word)):
                start_of[character] = position
            end += 1 + len(word)
        for start, stop in encoding.offsets:
            for position in {start_of[character] for character in range(start, stop) if character in start_of}:
                touching[position] = touching.get(position, 0) + 1
        kept = [word for position, word in enumerate(candidates) if touching.get(position) == 1]
        if kept == candidates:
            break
        candidates = kept
    if len(candidates) < MIN_WORDS:
        raise BadPlan(
            f"{path}: only {len(candidates)} words are one token each in this tokenizer: too few to write prompts with"
        )
    # Some tokenizers put a blank before a text themselves, others need one for its first word to be one
    # token.
    alone = {lead: _num_tokens(tokenizer, [lead + word for word in candidates]) for lead in ("", " ")}
    return Words(words=tuple(candidates), lead=min(alone, key=lambda lead: alone[lead]))


def encoder_of(path: str | Path) -> Callable[[str], list[int]]:
    """What the tokenizer makes of a text, nothing added. Raises BadPlan."""
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _num_tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))


def _model_vocab_size(path: Path) -> int | None:
    """What the model's own `config.json` says, if there is one."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        size = json.loads(config.read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int else None
