"""The tokenizer table of llguidance: which bytes each token id of a model stands for."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import TOKENIZER_FILE
from baton.engine.constraints.token_bits import Bits, bits_of, clear, num_words


class GrammarTokenizer:
    """Table of a tokenizer, shared by all grammars of a worker.

    table: llguidance's own table. It may be larger than the vocabulary, if a tokenizer has more ids than the
        model.
    num_words: uint32 words in a mask of `table`.
    known: bits of the ids that the tokenizer has, within the model's vocabulary. Padded ids are not in it.
    vocab_size: width of the model's logits.
    """

    def __init__(self, table: LLTokenizer, known: Bits, vocab_size: int) -> None:
        self.table = table
        self.num_words = num_words(table.vocab_size)
        self.known = known
        end_marks = bits_of(table.eos_tokens, table.vocab_size)
        self._end_words = np.flatnonzero(end_marks)
        self._end_marks = end_marks[self._end_words]
        self.vocab_size = vocab_size

    def have_end_marks(self, masks: Bits) -> list[bool]:
        """Return for each mask whether it has an id that llguidance allows where a grammar accepts."""
        found: list[bool] = np.logical_or.reduce(masks[:, self._end_words] & self._end_marks, axis=1).tolist()
        return found

    def knows(self, token_id: int) -> bool:
        """Return True for an id that both the tokenizer and the model have."""
        return 0 <= token_id < self.vocab_size and bool(self.known[token_id >> 5] >> np.uint32(token_id & 31) & 1)

    def inside(self, end_token_ids: Collection[int]) -> Bits:
        """Return the bits of the ids that a grammar may contain: known ones that do not end a response."""
        inside = self.known.copy()
        ends = {*end_token_ids, *self.table.eos_tokens}
        clear(inside, [token_id for token_id in ends if token_id < self.vocab_size])
        return inside

    def is_special(self, token_id: int) -> bool:
        """Return True for a token that is not text, for example the end of a message."""
        return 0 <= token_id < self.table.vocab_size and self.table.is_special_token(token_id)


def read_grammar_tokenizer(
    model_dir: Path, *, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> Callable[[], GrammarTokenizer]:
    """Return a function that builds the table from the model directory's `tokenizer.json`.

    Building holds the GIL: 10 ms for 4,000 tokens, 1 s or more and 130 MB for 150,000. The function raises
    ModelError if llguidance cannot use the tokenizer.
    """

    def build() -> GrammarTokenizer:
        path = model_dir / TOKENIZER_FILE
        try:
            text = path.read_text()
            ids = _ids(json.loads(text))
            table = _table(text, ids, vocab_size, eos_token_ids)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} cannot be used for grammars: {error}") from error
        return GrammarTokenizer(table, bits_of([i for i in ids if i < vocab_size], vocab_size), vocab_size)

    return build


def byte_grammar_tokenizer(tokens: Sequence[bytes], special_token_ids: Collection[int] = ()) -> GrammarTokenizer:
    """Return the table of a tokenizer whose token `i` is `tokens[i]`; for simulated models."""
    table = LLTokenizer(TokenizerWrapper(_ByteTokens(tokens, special_token_ids)), n_vocab=len(tokens), slices=[])
    return GrammarTokenizer(table, bits_of(range(len(tokens)), len(tokens)), len(tokens))


class _ByteTokens:
    """The attributes that llguidance reads of a tokenizer that is written in Python."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Collection[int]) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special_token_ids)
        self.eos_token_id = self.special_token_ids[0] if self.special_token_ids else len(tokens) - 1
        self._id_of = {token: number for number, token in enumerate(tokens)}

    def __call__(self, text: bytes) -> list[int]:
        return [found for byte in text if (found := self._id_of.get(bytes((byte,)))) is not None]


def _ids(description: dict[str, object]) -> list[int]:
    """Return all token ids of a `tokenizer.json`, ascending."""
    model, added = description["model"], description.get("added_tokens") or []
    if not isinstance(model, dict) or not isinstance(added, list):
        raise TypeError("model must be an object, and added_tokens a list")
    vocab = model["vocab"]
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))  # Unigram has a list
    return sorted(ids.union(token["id"] for token in added))


def _table(text: str, ids: Sequence[int], vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    known = set(ids)
    eos = [token_id for token_id in dict.fromkeys(eos_token_ids) if token_id in known]
    return LLTokenizer(text, n_vocab=max(vocab_size, ids[-1] + 1), eos_token=eos or None)
