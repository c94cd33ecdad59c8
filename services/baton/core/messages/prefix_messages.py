"""Messages of the stream on which a gateway exports a cached prefix of a worker, or imports one.

The gateway opens the stream with `ExportPrefix` or `ImportPrefix`. A file of a prefix is sent in parts. Each
`NextPart` allows the other end to send one part more, so at most `WINDOW_PARTS` parts wait anywhere.
"""

from dataclasses import dataclass
from typing import TypeAlias

from baton.core.kv.block_hash import BlockHash

PART_BYTES = 256 * 1024
"""Bytes of a part, except of the last one."""
MAX_PART_BYTES = 2**20
"""Largest part that is accepted."""
WINDOW_PARTS = 4
"""Parts that may be under way: what the receive buffer of a stream holds."""
MAX_PREFIX_BLOCKS = 65_536
"""Longest prefix, in blocks of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPrefix:
    """Asks for the longest cached prefix of these blocks. The first `NextPart` accepts the offer.

    tenant_root: of the tenant whose blocks they are
    """

    hashes: tuple[BlockHash, ...]
    tenant_root: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOffer:
    """Answers `ExportPrefix`: the leading blocks that the worker holds in any tier, and the bytes of their
    file."""

    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPrefix:
    """Announces the parts of a file. `tenant_root`: the tenant for which it must have been exported."""

    tenant_root: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBlocks:
    """The outcome of an import.

    num_blocks: leading blocks of the file that are cached now; num_cached_before of them were already
    num_file_blocks: blocks of the file. It has more if too few blocks of the worker were free.
    """

    num_blocks: int
    num_cached_before: int
    num_file_blocks: int


@dataclass(frozen=True, slots=True)
class FilePart:
    """Consecutive bytes of a file."""

    data: bytes
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class NextPart:
    """Allows the other end to send one more part."""


PrefixRequest: TypeAlias = ExportPrefix | ImportPrefix | FilePart | NextPart
"""Messages of the gateway."""
PrefixReply: TypeAlias = PrefixOffer | FilePart | NextPart | ImportedBlocks
"""Messages of the worker."""
