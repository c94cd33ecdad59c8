"""Content hashes of a model's files, for what two processes must share: the same on every machine and after
every copy."""

from hashlib import blake2b
from pathlib import Path

from baton.core.errors import ModelError

FINGERPRINT_BYTES = 16
EMULATED = "emulated-"
"""How the fingerprint of a model begins whose steps take time and compute nothing."""
TOKENIZER_FILE = "tokenizer.json"


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Hex digest of `tokenizer.json`: equal exactly when gateway and workers mean the same token by the same
    id. Raises ModelError if the directory has none."""
    path = model_dir / TOKENIZER_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{model_dir} has no readable {TOKENIZER_FILE} ({error.strerror}). Save the model's fast tokenizer beside its weights: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({str(model_dir)!r})"
        ) from error
    return blake2b(content, digest_size=FINGERPRINT_BYTES, person=b"baton-tokenizer").hexdigest()
