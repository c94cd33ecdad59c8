"""Program of `GrammarChecker`'s child: compiles the grammars that it reads from standard input.

Each message is a length in 4 bytes, little-endian, and its bytes: a grammar in, a JSON string out, empty if
the grammar is valid. The first message out says that the tokenizer's table is built.
"""

import json
import resource
import struct
import sys
from pathlib import Path

from baton.core.errors import Refused
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints.compiled_grammar import CompiledGrammar
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, read_grammar_tokenizer

_MEMORY = 1 << 30
_MAX_MESSAGE = 300


def serve(tokenizer: GrammarTokenizer) -> None:
    """Compile grammars until standard input ends."""
    _limit_memory()
    _put("")
    while len(header := sys.stdin.buffer.read(4)) == 4:
        (size,) = struct.unpack("<I", header)
        text = sys.stdin.buffer.read(min(size, MAX_GRAMMAR_BYTES + 1))
        if size > MAX_GRAMMAR_BYTES:
            _put(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
            return
        _put(_message(text.decode(), tokenizer))


def _message(grammar: str, tokenizer: GrammarTokenizer) -> str:
    try:
        CompiledGrammar(grammar, tokenizer)
    except Refused as refused:
        text = " ".join(refused.failure.message.split())
        return "".join(c for c in text if c.isprintable())[:_MAX_MESSAGE]
    return ""


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _put(message: str) -> None:
    reply = json.dumps(message).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(reply)) + reply)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(read_grammar_tokenizer(Path(sys.argv[1]), vocab_size=int(sys.argv[2]))())
