"""Program of `GrammarChecker`'s child: compiles the grammars that it reads from standard input.

Each message is a length in 4 bytes, little-endian, and its bytes: a grammar in; JSON out, which is null if
the grammar is valid, or else the fields of a `GrammarProblem`. The first message out says that the
tokenizer's table is built.
"""

import json
import resource
import struct
import sys
from dataclasses import asdict
from pathlib import Path

from llguidance import LLMatcher

from baton.core.errors import Refused
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints.compiled_grammar import LIMITS, CompiledGrammar
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer, read_grammar_tokenizer
from baton.gateway.grammar_checks.grammar_problem import GrammarProblem, explained


def serve(tokenizer: GrammarTokenizer, memory_bytes: int) -> None:
    """Compile grammars until standard input ends. The process may grow by `memory_bytes`."""
    _limit_memory(memory_bytes)
    _put(None)
    while len(header := sys.stdin.buffer.read(4)) == 4:
        (size,) = struct.unpack("<I", header)
        text = sys.stdin.buffer.read(min(size, MAX_GRAMMAR_BYTES + 1))
        if size > MAX_GRAMMAR_BYTES:
            _put(GrammarProblem(message=f"has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"))
            return
        _put(problem_of(text.decode(), tokenizer))


def problem_of(grammar: str, tokenizer: GrammarTokenizer) -> GrammarProblem | None:
    """Compile a grammar. Returns None if it is valid."""
    try:
        CompiledGrammar(grammar, tokenizer)
    except Refused as refused:
        error = _error(grammar, tokenizer) or str(refused)
        return explained(grammar, error, lambda other: str(LLMatcher.validate_grammar(other)))
    return None


def _error(grammar: str, tokenizer: GrammarTokenizer) -> str:
    """Return llguidance's own message; empty if only the first mask fails."""
    return str(LLMatcher(tokenizer.table, grammar, log_level=0, limits=LIMITS).get_error())


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _put(problem: GrammarProblem | None) -> None:
    reply = json.dumps(asdict(problem) if problem is not None else None).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(reply)) + reply)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(read_grammar_tokenizer(Path(sys.argv[1]), vocab_size=int(sys.argv[2]))(), int(sys.argv[3]))
