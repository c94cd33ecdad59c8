"""A small vocabulary of bytes and words, grammars over it, and constraints that use it."""

from functools import cache

from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, byte_grammar_tokenizer
from baton.engine.constraints.token_constraints import TokenConstraints

EOS = 0
WORDS = (b'"name":', b'{"', b'":"', b'","', b"name", b"kind", b"tru", b"true", b"null", b"al", b"alse", b'"}', b"ab")
VOCAB_SIZE = 256
"""That of the tiny models."""
TOKENS = (b"<end>", *(bytes((byte,)) for byte in range(32, 127)), *WORDS)
GRAMMARS = (
    'start: "{\\"name\\":\\"" /[a-f]{1,6}/ "\\",\\"kind\\":" ("true" | "false" | "null") "}"',
    "start: /[abc]{4,20}(,[0-9]{2})*/",
    'start: ("ab" | "name" | "al")+ ";"',
)


@cache
def tokenizer() -> GrammarTokenizer:
    """Return the table; ids beyond the vocabulary of words have tokens that no grammar allows."""
    unused = (b"\xff%d" % number for number in range(VOCAB_SIZE - len(TOKENS)))
    return byte_grammar_tokenizer([*TOKENS, *unused], special_token_ids=[EOS])


def ids(text: bytes) -> list[int]:
    """Return single-byte tokens with this text."""
    return [TOKENS.index(bytes((byte,))) for byte in text]


def text_of(tokens: list[int]) -> bytes:
    return b"".join(b"" if token == EOS else TOKENS[token] for token in tokens)


def new_constraints(*, finds_forced: bool = True) -> TokenConstraints:
    return TokenConstraints(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), tokenizer=tokenizer, finds_forced=finds_forced)
