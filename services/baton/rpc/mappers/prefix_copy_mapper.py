"""Converts the messages of exports and imports of prefixes between core and protobuf."""

from baton.core.errors import invalid
from baton.core.kv.block_hash import HASH_BYTES, BlockHash
from baton.core.messages.prefix_messages import (
    MAX_PART_BYTES,
    MAX_PREFIX_BLOCKS,
    ExportPrefix,
    FilePart,
    ImportedBlocks,
    ImportPrefix,
    NextPart,
    PrefixOffer,
    PrefixReply,
    PrefixRequest,
)
from baton.rpc.mappers import common_mapper as c
from baton.wire.v1 import worker_pb2 as pb


def to_prefix_request(message: PrefixRequest) -> pb.PrefixRequest:
    match message:
        case FilePart():
            return pb.PrefixRequest(part=_to_part(message))
        case NextPart():
            return pb.PrefixRequest(next=pb.NextPart())
        case ExportPrefix():
            hashes = c.to_hash_bytes(message.hashes)
            return pb.PrefixRequest(export_prefix=pb.ExportPrefix(block_hashes=hashes, tenant_root=message.tenant_root))
        case ImportPrefix():
            return pb.PrefixRequest(import_prefix=pb.ImportPrefix(tenant_root=message.tenant_root))


def from_prefix_request(message: pb.PrefixRequest) -> PrefixRequest:
    match message.WhichOneof("kind"):
        case "part":
            return _from_part(message.part)
        case "next":
            return NextPart()
        case "export_prefix":
            hashes = c.from_hash_bytes(message.export_prefix.block_hashes)
            if len(hashes) > MAX_PREFIX_BLOCKS:
                raise invalid(f"an export asks for {len(hashes)} blocks; at most {MAX_PREFIX_BLOCKS} are allowed")
            return ExportPrefix(hashes=hashes, tenant_root=_root(message.export_prefix.tenant_root))
        case "import_prefix":
            return ImportPrefix(tenant_root=_root(message.import_prefix.tenant_root))
        case _:
            raise invalid("a message of an export or import is of no known kind")


def to_prefix_reply(message: PrefixReply) -> pb.PrefixReply:
    match message:
        case FilePart():
            return pb.PrefixReply(part=_to_part(message))
        case NextPart():
            return pb.PrefixReply(next=pb.NextPart())
        case PrefixOffer():
            offer = pb.PrefixOffer(num_blocks=message.num_blocks, num_bytes=message.num_bytes)
            return pb.PrefixReply(offer=offer)
        case ImportedBlocks():
            return pb.PrefixReply(
                imported=pb.ImportedBlocks(
                    num_blocks=message.num_blocks,
                    num_cached_before=message.num_cached_before,
                    num_file_blocks=message.num_file_blocks,
                )
            )


def from_prefix_reply(message: pb.PrefixReply) -> PrefixReply:
    match message.WhichOneof("kind"):
        case "part":
            return _from_part(message.part)
        case "next":
            return NextPart()
        case "offer":
            return PrefixOffer(num_blocks=message.offer.num_blocks, num_bytes=message.offer.num_bytes)
        case "imported":
            imported = message.imported
            return ImportedBlocks(
                num_blocks=imported.num_blocks,
                num_cached_before=imported.num_cached_before,
                num_file_blocks=imported.num_file_blocks,
            )
        case _:
            raise invalid("a worker's reply to an export or import is of no known kind")


def _to_part(part: FilePart) -> pb.FilePart:
    return pb.FilePart(data=part.data, is_last=part.is_last)


def _from_part(message: pb.FilePart) -> FilePart:
    if len(message.data) > MAX_PART_BYTES:
        raise invalid(f"a part of a file has {len(message.data)} bytes; at most {MAX_PART_BYTES} are allowed")
    return FilePart(message.data, message.is_last)


def _root(root: bytes) -> BlockHash:
    if len(root) != HASH_BYTES:
        raise invalid(f"a tenant root has {len(root)} bytes; must be {HASH_BYTES}")
    return root
