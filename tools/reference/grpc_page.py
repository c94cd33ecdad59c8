"""The gRPC page: services, methods and messages of `baton.v1`, with the comments of the .proto files."""

import re
from pathlib import Path

from tools.reference.markdown import block, page, paragraph

PROTO = Path(__file__).resolve().parents[2] / "proto" / "baton" / "v1"
_HEAD = re.compile(r"\A((?://[^\n]*\n)+)")
INTRODUCTION = """
The package `baton.v1` is the public gRPC API of a gateway. Fields are only added. The port also serves
`grpc.health.v1.Health`, which needs no API key, and server reflection, which needs one if keys are on, so
`grpcurl` works without the .proto files. The messages between
Baton's own services (`baton.wire.v1`) are described in [Protocol](../design/protocol.md) and may change between
releases. [Errors](errors.md) lists the status and the reason of each failure, and what a client does about it.
"""


def grpc_page() -> str:
    """One section per .proto file: its comment as text, its definitions as code."""
    parts = [paragraph(INTRODUCTION)]
    for file in sorted(PROTO.glob("*.proto")):
        text = file.read_text(encoding="utf-8")
        head = _HEAD.match(text)
        comment = "\n".join(line.removeprefix("//").strip() for line in head[1].splitlines()) if head else ""
        body = text[head.end() :] if head else text
        definitions = re.sub(r"^(syntax|package|import)[^\n]*\n+", "", body.lstrip(), flags=re.MULTILINE)
        parts += [f"## {file.name}", paragraph(comment), block(definitions.strip(), "protobuf")]
    return page("gRPC API", *parts)
