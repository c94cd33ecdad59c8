"""Checks that a draft model has the tokenizer of the model that verifies its drafts.

Token ids are all that the two models exchange. With other ids every draft would be wrong, which costs time
and is not an error that anybody would notice.
"""

from pathlib import Path

from tokenizers import Tokenizer

from baton.core.errors import ModelError
from baton.core.tokenizer_fingerprint import TOKENIZER_FILE, tokenizer_fingerprint

SAMPLE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, twice; isn't it?",
    "  two spaces\n\n\ttabs and\r\nlines ",
    'def f(x: int) -> dict:\n    return {"value": x ** 2, "name": f"{x:04d}"}  # 3.14159',
    "12345678901234567890 0x1F 1,000.50 €",
    "Äpfel, naïve façade, Łódź, Привет, мир! 你好,世界。 こんにちは 안녕하세요 مرحبا हिन्दी ไทย",
    "👩‍👩‍👧‍👦 ∑∞ e\u0301 é",
)
"""Texts that tokenizers with equal vocabularies, but other splitting or normalisation, encode differently."""
_REMEDY = "give a draft model of the same family, whose tokenizer.json has the same tokens"


def require_same_tokenizer(verifying: Path, draft: Path) -> None:
    """Check that both model directories turn text into the same token ids.

    Files of other content may do so: added tokens, such as those of a chat template, may be missing in one
    of them. Raises ModelError with the first difference, or if a file cannot be read.
    """
    if tokenizer_fingerprint(verifying) == tokenizer_fingerprint(draft):
        return
    first, second = _load(verifying), _load(draft)
    ours, theirs = first.get_vocab(with_added_tokens=True), second.get_vocab(with_added_tokens=True)
    other = [token for token, token_id in ours.items() if theirs.get(token, token_id) != token_id]
    base = first.get_vocab(with_added_tokens=False).keys() ^ second.get_vocab(with_added_tokens=False).keys()
    missing = [token for token in base if token not in ours or token not in theirs]
    if other or missing:
        token = min(other or missing)
        raise ModelError(
            f"the draft model {draft} has another tokenizer than {verifying}: {len(other)} tokens have another id and "
            f"{len(missing)} exist in one of them only, for example {token!r} ({ours.get(token)} and "
            f"{theirs.get(token)}); {_REMEDY}"
        )
    for text in SAMPLE_TEXTS:
        found, expected = (t.encode(text, add_special_tokens=False).ids for t in (second, first))
        if found != expected:
            raise ModelError(
                f"the draft model {draft} splits text otherwise than {verifying}, although both have the same tokens: "
                f"{text[:20]!r} is {found[:4]} and {expected[:4]}; {_REMEDY}"
            )


def _load(model_dir: Path) -> Tokenizer:
    path = model_dir / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ModelError(f"{path} cannot be read: {error}; save the tokenizer again") from error
