"""Fingerprint of a model's tokenizer, by which gateway and workers check that they use the same one.

It is a hash of the file's content, so it is the same on every machine and for every copy.
"""

from hashlib import blake2b
from pathlib import Path

from baton.core.errors import ModelError

FINGERPRINT_BYTES = 16
EMULATED = "emulated-"
"""Prefix of a model fingerprint on an emulated device, which only waits for the predicted step time."""
TOKENIZER_FILE = "tokenizer.json"


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Return the hex digest of the model directory's `tokenizer.json`.

    Equal digests mean that gateway and workers map the same token to the same id. Raises ModelError if the
    file is missing or unreadable.
    """
    path = model_dir / TOKENIZER_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{model_dir} has no readable {TOKENIZER_FILE} ({error.strerror}); "
            "save the model's fast tokenizer next to its weights: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({str(model_dir)!r})"
        ) from error
    return blake2b(content, digest_size=FINGERPRINT_BYTES, person=b"baton-tokenizer").hexdigest()
