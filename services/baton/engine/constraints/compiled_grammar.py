"""Compiled grammars, and matchers that follow one response through a grammar.

All limits count work, not time, so that every worker decides alike. `docs/design/constrained-output.md` has
the times that they stand for.
"""

import json
from collections.abc import Sequence
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from baton.core.errors import Code, Failure, Reason, Refused, invalid
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer
from baton.engine.constraints.token_bits import Bits

LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=300_000,
    max_items_in_row=600,
    step_max_items=15_000,
    step_lexer_fuel=30_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""Limits of a grammar as a whole (the first two), of one token (the next three), and of a matcher's
memory."""
_MAX_MESSAGE = 300
_NO_FORCING = {"name": "baton_no_forcing", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: "x"'}
_EXCEEDED = ("too many", "current row has", "too large", "too complex", "limit")
"""Parts of llguidance's messages for an exceeded limit."""


class GrammarMatcher:
    """Follows one response through a grammar.

    consumed: the tokens that it has followed.
    """

    __slots__ = ("_accepts", "_mask", "_matcher", "consumed")

    def __init__(
        self, matcher: LLMatcher, consumed: TokenIds, mask: Bits | None = None, *, accepts: bool = False
    ) -> None:
        self._matcher = matcher
        self._mask = mask  # of this state, if it was computed in advance
        self._accepts = accepts  # valid with `_mask`
        self.consumed = consumed

    def copy(self) -> "GrammarMatcher":
        """Return a matcher in the same state that is independent of this one."""
        return GrammarMatcher(self._matcher.deep_copy(), self.consumed[:], self._mask, accepts=self._accepts)

    def can_follow(self, outputs: TokenIds) -> bool:
        """Return True if `outputs` begin with the tokens that this matcher has consumed."""
        return outputs[: len(self.consumed)] == self.consumed

    def follow(self, outputs: TokenIds) -> None:
        """Consume the tokens of `outputs` that are new. Raises Refused if they do not match."""
        new = outputs[len(self.consumed) :]
        if not new:
            return
        self._mask = None
        if not self._matcher.consume_tokens(new.tolist()):
            raise Refused(_failure(self._matcher.get_error(), len(self.consumed)))
        self.consumed = outputs

    @property
    def is_accepting(self) -> bool:
        """True if the response may end here."""
        return self._matcher.is_accepting() if self._mask is None else self._accepts

    def check(self) -> None:
        """Raise Refused if a limit was exceeded."""
        if self._mask is None and self._matcher.is_error():
            raise Refused(_failure(self._matcher.get_error(), len(self.consumed)))

    def keep_mask(self, tokenizer: GrammarTokenizer) -> None:
        """Compute the mask of this state in advance. Raises Refused if a limit is exceeded."""
        if self._mask is None:
            mask = np.zeros((1, tokenizer.num_words), dtype=np.uint32)
            fill_masks([self], mask)
            self.check()
            self._accepts = self._matcher.is_accepting()
            self._mask = mask[0]


def fill_masks(matchers: Sequence[GrammarMatcher], masks: Bits, executor: LLExecutor | None = None) -> None:
    """Set row i of `masks` to the tokens that matcher i allows next.

    masks: [len(matchers), GrammarTokenizer.num_words], C-contiguous. A row is arbitrary if `check` raises
        afterwards.
    executor: computes the rows in parallel; None: in the calling thread. The GIL is released in both cases.
    """
    row_bytes = masks.shape[1] * masks.itemsize
    address: int = masks.ctypes.data
    unknown: list[tuple[LLMatcher, int]] = []
    for row, one in enumerate(matchers):
        if one._mask is not None:
            masks[row] = one._mask
        else:
            unknown.append((one._matcher, row))
    if executor is not None and len(unknown) > 1:
        executor.unsafe_compute_mask_ptr(unknown, address, row_bytes, len(masks))
        return
    for matcher, row in unknown:
        matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)


class CompiledGrammar:
    """A grammar that llguidance has accepted.

    start: matcher of the empty response, with its mask. Copy it.
    num_fast_masks: masks in a row that were fast, of any response.
    lock: held by threads other than the one that samples while they use a matcher. Matchers of one grammar
        share a lock in llguidance, and wait for it with the GIL.
    """

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        """Compile `grammar`. Releases the GIL. Raises Refused if it is invalid or exceeds a limit."""
        size = len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed. Use a smaller schema"
            raise invalid(message, Reason.INVALID_GRAMMAR)
        matcher = LLMatcher(tokenizer.table, _without_forcing(grammar), log_level=0, limits=LIMITS)
        if matcher.is_error():
            message = f"the grammar cannot be used: {_summary(matcher.get_error())}"
            raise invalid(message, Reason.INVALID_GRAMMAR)
        self.num_fast_masks = 0
        self.lock = Lock()
        self.start = GrammarMatcher(matcher, token_ids())
        self.start.keep_mask(tokenizer)


def no_token_left(message: str) -> Failure:
    """Return the failure of a request whose rules leave no token to draw."""
    return Failure(code=Code.UNPROCESSABLE, reason=Reason.NO_TOKEN_LEFT, message=message)


def _failure(error: str, position: int) -> Failure:
    summary = _summary(error)
    if any(part in summary.lower() for part in _EXCEEDED):
        return no_token_left(f"the grammar is too expensive after {position} tokens ({summary}); simplify it")
    return no_token_left(f"the response does not match its grammar after {position} tokens: {summary}")


def _summary(error: str) -> str:
    """Return an error of llguidance in one line, without the state of its parser."""
    return " ".join(error.partition("\n<")[0].split())[:_MAX_MESSAGE]


def _without_forcing(grammar: str) -> str:
    """Return the grammar with llguidance's forced tokens switched off.

    Otherwise a text that can only continue in one way must be tokenized as the tokenizer would do it. Then
    more tokens are forbidden than the grammar forbids, and other rules could leave none. The option holds for
    all grammars of a list if one of them, which nothing refers to, sets it.
    """
    grammars: list[object] = [{"lark_grammar": grammar}]
    top: dict[str, object] = {}
    if grammar.lstrip().startswith("{"):
        try:
            top = json.loads(grammar)
        except (ValueError, RecursionError):
            return grammar  # llguidance says what is wrong
        listed = top.get("grammars")
        if not isinstance(listed, list):
            return grammar
        grammars = listed
    return json.dumps({**top, "grammars": [*grammars, _NO_FORCING]})
