"""Texts with which two implementations of a tokenizer are compared.

Most differences between implementations are at the seams: added tokens, contractions, digits, runs of space,
and characters outside ASCII.
"""

from collections.abc import Iterable, Iterator
from itertools import islice, product
from random import Random

MAX_ADDED_TOKENS = 64
"""Added tokens that are used. A model may have hundreds of reserved ones, which do not differ."""
NUM_RANDOM_TEXTS = 256
_SEED = 31

SNIPPETS = (
    *("'s", "'S", "'re", "'LL", "'d", "'\u017f", "\u2019s", "don't", "it's.", "'"),
    *("the", " The", "HELLO", "camelCase", "__init__", "x_1", "a" * 40, "snake_case.py", "\n    return x\n"),
    *("0", "12", "345", "678901234", "1,000.50", "\u0663\u0664", "\u00bd", "\u00b2", "\u2167"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n ", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b", "\x1c"),
    *("!", "...", "-->", "<|", "|>", "{}", "/*", "\\n", "https://a.b/c?d=e&f", "\u00ab\u00bb", "\u3002", "\uff0c"),
    *("na\u00efve", "e\u0301", "\u0301", "\u00c5", "\ufb01", "\u00df", "\u0130", "\u043c\u0438\u0440"),
    *("\u4e2d\u6587", "\u65e5\u672c\u8a9e\u3067", "\ud55c\uad6d\uc5b4", "\u1112\u1161\u11ab", "\u05e2\u05d1"),
    *("\u0645\u064f", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e20\u0e32\u0e29\u0e32", "\U0001d518", "\U00020000"),
    *("\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u270b\U0001f3fd"),
    *("\u200b", "\ufeff", "\ufffd", "\ue000", "\U0010ffff", "\x00", "\x7f"),
)


def check_texts(added_tokens: Iterable[str]) -> Iterator[str]:
    """Yield some hundred texts with these added tokens, the same ones each time. Their 30,000 characters take
    about 30 ms with `tokenizers`."""
    added = list(islice(added_tokens, MAX_ADDED_TOKENS))
    yield ""
    for one, other in product(SNIPPETS[:: len(SNIPPETS) // 12], SNIPPETS):
        yield f"a{one}{other}b"
    for token, other in zip(added, added[1:] + added[:1], strict=True):
        yield f"{token}a {token} {token}{token}\n{token[:-1]} {token[1:]}{token}"
        yield f"{other}{token}"
        yield f"{token}{other}"
    rng = Random(_SEED)
    for _ in range(NUM_RANDOM_TEXTS):
        yield "".join(_part(rng, added) for _ in range(rng.randint(1, 24)))


def _part(rng: Random, added: list[str]) -> str:
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(SNIPPETS)
        case 2 if added:
            return rng.choice(added)
        case 3:
            return "".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(1, 12)))
        case 4:
            return chr(rng.randrange(0x20, 0xD800))
        case 5:
            return chr(rng.randrange(0xE000, 0x20000))
        case 6:
            return chr(rng.randrange(128))
    return " "
