"""Chained content hashes of KV blocks: equal hashes mean equal KV.

The hash of a block covers its own tokens and, through the parent's hash, all tokens before it. The root of
the chain covers everything else that affects the KV: model, tenant salt, adapter, block size, and the hash
scheme.
"""

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import TypeAlias

TokenIds: TypeAlias = "array[int]"
"""Token ids as `array('I')`, 4 bytes per token. Treat it as immutable once it is shared."""

BlockHash: TypeAlias = bytes
"""16 bytes. `NO_HASH` marks a block whose content is not final."""

HASH_BYTES = 16
NO_HASH: BlockHash = bytes(HASH_BYTES)
PREFIX_KEY_BLOCKS = 8
"""Most blocks that `prefix_key` covers."""
HASH_SCHEME = "blake2b-128/1"
TENANT_SALT_BYTES = 16
"""Bytes of a tenant's cache salt. That of a request begins with it; a salt made of the client's follows."""


def token_ids(values: Iterable[int] = ()) -> TokenIds:
    """Convert an iterable of ints.

    Raises OverflowError or TypeError for a value that is not an unsigned 32-bit int.
    """
    return array("I", values)


def root_hash(
    *, model_fingerprint: str, cache_salt: bytes = b"", adapter: str = "", block_size_tokens: int
) -> BlockHash:
    """Return the parent hash of every first block.

    Fields are length-prefixed, so their encoding is unambiguous. `adapter` is reserved for LoRA adapters and
    is always empty.
    """
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


def tenant_root(*, model_fingerprint: str, cache_salt: bytes, block_size_tokens: int) -> BlockHash:
    """Return the hash that stands for a tenant, whatever salt its client has added to `cache_salt`.

    It is kept with blocks in a file, and does not tell the salt.
    """
    return root_hash(
        model_fingerprint=model_fingerprint,
        cache_salt=cache_salt[:TENANT_SALT_BYTES].ljust(TENANT_SALT_BYTES, b"\0"),
        block_size_tokens=block_size_tokens,
    )


def chain(parent: BlockHash, tokens: TokenIds, block_size_tokens: int) -> Iterator[BlockHash]:
    """Yield the hashes of the full blocks of `tokens`. The first block is a child of `parent`.

    A partial last block has no hash.
    """
    view = memoryview(tokens).cast("B")
    step = block_size_tokens * tokens.itemsize
    for end in range(step, len(view) + 1, step):
        parent = blake2b(b"".join((parent, view[end - step : end])), digest_size=HASH_BYTES).digest()
        yield parent


def prefix_key(tokens: TokenIds, block_size_tokens: int) -> bytes:
    """Return a hash of the first `PREFIX_KEY_BLOCKS` full blocks, or of fewer if there are fewer; empty for
    none.

    Equal for all tenants and models, so it must not lead to KV.
    """
    num_tokens = min(PREFIX_KEY_BLOCKS, len(tokens) // block_size_tokens) * block_size_tokens
    if not num_tokens:
        return b""
    content = memoryview(tokens).cast("B")[: num_tokens * tokens.itemsize]
    return blake2b(content, digest_size=HASH_BYTES, person=b"baton-prefix-key").digest()


def table_hash(block_hash: BlockHash, table: int) -> BlockHash:
    """Return the hash of a block's part in block table `table` (`core.kv.kv_tables`). Table 0 has the hash of
    the tokens themselves."""
    return block_hash[:-1] + bytes((block_hash[-1] ^ table,)) if table else block_hash


def first_visible_block(index: int, window: int, block_size_tokens: int) -> int:
    """Return the first block that the token at KV index `index`, or any later one, sees.

    window: number of tokens that a token sees, itself included; 0 for all.
    """
    return max(0, index - window + 1) // block_size_tokens if window else 0


def num_blocks_for(num_tokens: int, block_size_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens; the last one may be partial."""
    return -(-num_tokens // block_size_tokens)
