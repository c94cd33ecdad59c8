"""Reads the types of a GGUF file's tokens, and which tokens end a response. Corrects known wrong types."""

from collections.abc import Iterator

from baton.model.loading.gguf.gguf_metadata import GgufMetadata

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of a token, in `tokenizer.ggml.token_type`: text; no text; found whole in a text, and shown; one that
only fills up the vocabulary."""
END_TEXTS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|endoftext|> <|eom_id|> <EOT> _<EOT> [EOT] [EOS]
    <end_of_turn> <|end_of_text|> <end_of_utterance> <eos> <turn|> <｜end▁of▁sentence｜>""".split()
)
"""Tokens that end a response. A file names one end token; chat models have more, as in llama.cpp."""
HARMONY_ENDS, MESSAGE_END = frozenset({"<|return|>", "<|call|>"}), "<|end|>"
"""gpt-oss's vocabulary has both of `HARMONY_ENDS`. There `MESSAGE_END` ends a message, not the response."""
BEGIN_TEXTS = frozenset(
    "<bos> <|begin_of_text|> <start_of_turn> <|im_start|> <|start_header_id|> <|end_header_id|>".split()
)
"""Tokens that begin a text or a turn."""


def token_types(metadata: GgufMetadata) -> list[int]:
    """Return the type of each token. Those of `END_TEXTS` and `BEGIN_TEXTS` are control tokens in any case.

    As llama.cpp does: some published files, such as those of Gemma 3 after training for Q4_0, give them other
    types. Their texts would be split into pieces, and would not end a response.
    """
    types = _stored_types(metadata)
    for number, _ in _mistyped(metadata):
        types[number] = CONTROL
    return types


def mistyped_tokens(metadata: GgufMetadata) -> list[str]:
    """Return the texts of the tokens whose type `token_types` corrects."""
    return [text for _, text in _mistyped(metadata)]


def end_token_ids(metadata: GgufMetadata) -> list[int]:
    """Return the ids of tokens that end a response: those that the file names, and those of `END_TEXTS`."""
    named = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    tokens = metadata.texts("tokenizer.ggml.tokens")
    ends = END_TEXTS - {MESSAGE_END} if HARMONY_ENDS.issubset(tokens) else END_TEXTS
    known = [number for number, text in enumerate(tokens) if text in ends]
    return list(dict.fromkeys([number for number in (*named, *known) if number is not None]))


def _mistyped(metadata: GgufMetadata) -> Iterator[tuple[int, str]]:
    pairs = zip(metadata.texts("tokenizer.ggml.tokens"), _stored_types(metadata), strict=True)
    for number, (text, kind) in enumerate(pairs):
        if kind != CONTROL and text in END_TEXTS | BEGIN_TEXTS:
            yield number, text


def _stored_types(metadata: GgufMetadata) -> list[int]:
    """Return the types in the file. Tokens without one are text."""
    number = len(metadata.texts("tokenizer.ggml.tokens"))
    stored = metadata.integers("tokenizer.ggml.token_type")[:number]
    return stored + [NORMAL] * (number - len(stored))
