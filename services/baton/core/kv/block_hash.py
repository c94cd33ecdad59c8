"""Content hashes of KV blocks: who asks for a block by hash gets exactly the tokens, in exactly the context,
that the hash stands for.

A block's hash covers its own tokens and, through its parent's hash, every token before it; the root of the
chain covers what else decides the content: model, tenant salt, adapter, block size and the scheme itself.
"""

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TypeAlias

TokenIds: TypeAlias = "array[int]"
"""Token ids as `array('I')`: 4 bytes a token, sliced and hashed without a copy for each token. Treated as
immutable once shared."""

BlockHash: TypeAlias = bytes
"""16 bytes. `NO_HASH` marks a block whose content is not (yet) final."""

HASH_BYTES = 16
NO_HASH: BlockHash = bytes(HASH_BYTES)
HASH_SCHEME = "blake2b-128/1"


def token_ids(values: Iterable[int] = ()) -> TokenIds:
    """Any iterable of ints as `TokenIds`. Raises OverflowError or TypeError for what is not an unsigned
    32-bit integer."""
    return array("I", values)


def root_hash(
    *, model_fingerprint: str, cache_salt: bytes = b"", adapter: str = "", block_size_tokens: int
) -> BlockHash:
    """The parent of every first block. Each field is length-prefixed, so that no two field lists share one
    encoding."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"baton-kv-root")
    for field in (
        HASH_SCHEME.encode(),
        model_fingerprint.encode(),
        cache_salt,
        adapter.encode(),
        str(block_size_tokens).encode(),
    ):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def chain(parent: BlockHash, tokens: TokenIds, block_size_tokens: int) -> Iterator[BlockHash]:
    """Hashes of the full blocks of `tokens`, the first one a child of `parent`. A last block that is not full
    has no hash."""
    view = memoryview(tokens).cast("B")
    step = block_size_tokens * tokens.itemsize
    for end in range(step, len(view) + 1, step):
        parent = blake2b(b"".join((parent, view[end - step : end])), digest_size=HASH_BYTES).digest()
        yield parent


def num_blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens, the last one perhaps not full."""
    return -(-num_tokens // block_size_tokens)
