"""Compiled grammars, and matchers that follow one response through a grammar.

All limits count work, not time, so that every worker decides alike. `docs/design/constrained-output.md` has
the times that they stand for.
"""

import json
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from baton.core.errors import Code, Failure, Reason, Refused, invalid
from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request_limits import MAX_GRAMMAR_BYTES
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer
from baton.engine.constraints.matcher_executor import MatcherExecutor
from baton.engine.constraints.token_bits import Bits

LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    initial_lexer_fuel=300_000,
    max_items_in_row=600,
    step_max_items=15_000,
    step_lexer_fuel=200_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""Limits of a grammar as a whole (the first two), of one token (the next three), and of the lexer that all
matchers of a compiled grammar share."""
GRAMMAR_BYTES = 72
"""Memory of a byte of a grammar: its text, and what llguidance compiles it to. Up to 70 were measured."""
MAX_LEXER_BYTES = 24 << 20
"""Memory of a lexer with as many states as `LIMITS` allow."""
LEXER_BYTES_PER_S = 128 << 20
"""Growth of a lexer for each second of CPU time that masks take. Up to 110 MB were measured."""
SLOW_MASK_S = 0.002
"""A mask that took more CPU time is slow."""
OVERHEAD_S = 0.001
"""Time that a call for several masks may take beyond that of one slow mask. If it takes more, the next masks
are measured one by one."""
NUM_FAST_MASKS = 8
"""Masks in a row that must be fast until the masks of a new grammar are computed together."""
NUM_FAST_AFTER_SLOW = 64
"""The same after a slow mask."""
MIN_TOGETHER, MAX_TOGETHER = 8, 32
"""Masks of a fast grammar that are computed in one call. The number doubles with each call that was quick.
The largest one bounds the work of a call in which a grammar turns slow. Not tuned."""
QUICK_S = 0.001
"""Longest time of a quick call. Not tuned."""
MAX_ROLL_BACK = 16
"""Tokens of rejected drafts that a matcher gives back. If there are more, it is built again."""
FORCED_BYTES = 64
"""Forced text, in bytes, that is searched for each token of a response, on average. Not tuned."""
_MAX_MESSAGE = 300
_NO_FORCING = {"name": "baton_no_forcing", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: "x"'}
_EXCEEDED = ("too many", "current row has", "too large", "too complex", "limit")
"""Parts of llguidance's messages for an exceeded limit."""


class LexerFull(Refused):
    """The lexer of a grammar has reached a limit. All matchers of the grammar share it and stay unusable."""


class GrammarMatcher:
    """Follows one response through a grammar. Used by the thread that holds `CompiledGrammar.lock`.

    generation: of the lexer that it shares with other matchers of the grammar.
    consumed: the tokens that it has followed.
    mask: the tokens that may come next, [num_words]; None if it was not computed.
    is_accepting: the response may end here; valid with `mask`.
    forced: tokens that come next as far as `find_forced` knows.
    """

    __slots__ = ("_forced_work", "consumed", "forced", "generation", "is_accepting", "mask", "matcher")

    def __init__(self, matcher: LLMatcher, generation: int) -> None:
        self.matcher = matcher
        self.generation = generation
        self.consumed = token_ids()
        self.mask: Bits | None = None
        self.is_accepting = False
        self.forced: tuple[int, ...] = ()
        self._forced_work = 0

    def copy(self) -> "GrammarMatcher":
        """Return a matcher in the same state that goes on independently of this one."""
        copied = GrammarMatcher(self.matcher.deep_copy(), self.generation)
        copied.consumed, copied.mask, copied.is_accepting = self.consumed, self.mask, self.is_accepting
        return copied

    def can_follow(self, outputs: TokenIds) -> bool:
        """Return True if `outputs` begin with the tokens that this matcher has consumed."""
        return outputs[: len(self.consumed)] == self.consumed

    def roll_back(self, outputs: TokenIds) -> bool:
        """Give back the last tokens, so that `outputs` begin with those that are left. False if it cannot.

        At most `MAX_ROLL_BACK` tokens are given back: those of drafts that were rejected.
        """
        end = len(self.consumed)
        possible = range(end - 1, max(-1, end - 1 - MAX_ROLL_BACK), -1)
        kept = next((n for n in possible if outputs[:n] == self.consumed[:n]), None)
        if kept is None or not self.matcher.rollback(end - kept):
            return False
        self.consumed, self.mask, self.forced = self.consumed[:kept], None, ()
        return not self.matcher.is_error()

    def find_forced(self) -> None:
        """Find the tokens with which the tokenizer would write the text that the grammar forces next.

        The work is bounded for each token of the response: texts of any length may be forced again and again.
        """
        if self.forced or self._forced_work > FORCED_BYTES * (1 + len(self.consumed)):
            return
        probe = self.matcher.deep_copy()  # forcing a text may change the next masks
        forced = probe.compute_ff_bytes()
        self._forced_work += 1 + len(forced)
        self.forced = tuple(probe.compute_ff_tokens()) if forced else ()

    def follow(self, outputs: TokenIds, executor: MatcherExecutor) -> None:
        """Consume the tokens of `outputs` that are new. Raises Refused if they do not match."""
        if new := outputs[len(self.consumed) :]:
            before = len(self.consumed)
            num_consumed = executor.replay(self.matcher, new)
            self._consumed(outputs[: before + num_consumed])
            self.mask = None
            self.check(num_given=1)
            self._consumed(outputs)

    def advance(self, outputs: TokenIds, mask: Bits, *, may_accept: bool) -> None:
        """Record that `outputs` were consumed, and store the mask after them.

        Raises Refused if either failed.
        """
        self._consumed(outputs)
        self.keep_mask(mask, may_accept=may_accept)

    def _consumed(self, outputs: TokenIds) -> None:
        new = tuple(outputs[len(self.consumed) :])
        self.forced = self.forced[len(new) :] if self.forced[: len(new)] == new else ()
        self.consumed = outputs

    def check(self, *, num_given: int = 0) -> None:
        """Raise Refused if a token did not match or a limit was exceeded, LexerFull if the lexer did.

        num_given: tokens after `consumed` that the matcher was given up to its error.
        """
        if self.matcher.is_error():
            error = self.matcher.get_error()
            failure = _failure(error, len(self.consumed), num_given)
            raise (LexerFull if "lexer error" in error else Refused)(failure)

    def keep_mask(self, mask: Bits, *, may_accept: bool) -> None:
        """Store the mask that llguidance has computed. Raises Refused if it could not.

        may_accept: the mask has an end mark.
        """
        self.check()
        self.is_accepting = may_accept and self.matcher.is_accepting()
        self.mask = mask


class CompiledGrammar:
    """A grammar that llguidance has accepted, and its cost so far.

    text: the grammar. start: matcher of the empty response, with its mask. Copy it.
    generation: number of times that the grammar was compiled again.
    lock: held by the thread that uses the grammar's matchers. llguidance lets the others wait with the GIL.
    """

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        """Compile `grammar`. Releases the GIL. Raises Refused if it is invalid or exceeds a limit."""
        size = len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            message = f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed. Use a smaller schema"
            raise invalid(message, Reason.INVALID_GRAMMAR)
        self.text = grammar
        self.tokenizer = tokenizer
        self.lock = Lock()
        self.generation = 0
        self._num_fast_masks = 0
        self._num_fast_needed = NUM_FAST_MASKS
        self._num_together = MIN_TOGETHER
        self._masks_s = 0.0
        self._must_renew = False
        self.start = self._compile()

    def renew(self) -> None:
        """Compile the grammar again, with an empty lexer. Matchers of earlier generations must be dropped."""
        self.generation += 1
        self.start = self._compile()
        self._masks_s, self._must_renew = 0.0, False

    def renew_if_asked(self) -> None:
        """Compile the grammar again if `ask_to_renew` was called."""
        if self._must_renew:
            self.renew()

    def ask_to_renew(self) -> None:
        """Let the next thread that uses the grammar renew it, so that it takes less memory."""
        self._must_renew = True

    def count_mask(self, took_s: float, num_masks: int = 1) -> None:
        """Count masks that have taken `took_s` of CPU time together."""
        self._masks_s += took_s
        if took_s > SLOW_MASK_S * num_masks:
            self._num_fast_masks, self._num_fast_needed = 0, NUM_FAST_AFTER_SLOW
        else:
            self._num_fast_masks += num_masks
            if self._num_fast_masks >= self._num_fast_needed:
                self._num_fast_needed = NUM_FAST_MASKS

    def count_call(self, took_s: float, num_masks: int) -> None:
        """Count masks that were computed in one call.

        took_s: duration of the call, with the time that other threads took.
        """
        self.count_mask(took_s, num_masks)
        if took_s > SLOW_MASK_S + OVERHEAD_S:
            self._num_fast_masks = 0  # several together were slow, so the next ones are measured one by one
        if took_s > QUICK_S:
            self._num_together = MIN_TOGETHER
        elif num_masks == self._num_together:
            self._num_together = min(MAX_TOGETHER, 2 * num_masks)

    @property
    def num_together(self) -> int:
        """Number of masks to compute in one call. 1 until enough masks in a row were fast."""
        return self._num_together if self._num_fast_masks >= self._num_fast_needed else 1

    @property
    def is_slow(self) -> bool:
        """True if a mask was slow, and too few after it were fast."""
        return self._num_fast_needed > NUM_FAST_MASKS

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory: the lexer has grown by what its masks have cost in CPU time."""
        lexer_bytes = 0 if self._must_renew else min(MAX_LEXER_BYTES, int(self._masks_s * LEXER_BYTES_PER_S))
        return GRAMMAR_BYTES * len(self.text) + lexer_bytes

    def _compile(self) -> GrammarMatcher:
        matcher = LLMatcher(self.tokenizer.table, _without_forcing(self.text), log_level=0, limits=LIMITS)
        if matcher.is_error():
            message = f"the grammar cannot be used: {_summary(matcher.get_error())}"
            raise invalid(message, Reason.INVALID_GRAMMAR)
        start = GrammarMatcher(matcher, self.generation)
        mask = np.zeros((1, self.tokenizer.num_words), dtype=np.uint32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        start.keep_mask(mask[0], may_accept=self.tokenizer.have_end_marks(mask)[0])
        return start


def no_token_left(message: str) -> Failure:
    """Return the failure of a request whose rules leave no token to draw."""
    return Failure(code=Code.UNPROCESSABLE, reason=Reason.NO_TOKEN_LEFT, message=message)


def no_token_at(num_outputs: int, *, is_complete: bool) -> Failure:
    """Return the failure of a request whose rules leave no token after `num_outputs`.

    is_complete: its grammar allows the end there.
    """
    where = f"no token is left at position {num_outputs} of the response"
    if is_complete:
        return no_token_left(
            f"{where}: its grammar is complete, and ignore_eos, min_tokens, allowed_token_ids or bad_words forbid "
            "the end; relax them"
        )
    return no_token_left(
        f"{where}: grammar, allowed_token_ids, bad_words and min_tokens exclude every token; relax one of them"
    )


def _failure(error: str, num_consumed: int, num_given: int) -> Failure:
    summary = _summary(error)
    if any(part in summary.lower() for part in _EXCEEDED):
        num_tokens = num_consumed + num_given  # the grammar allows the last one, which is expensive to follow
        return no_token_left(f"the grammar is too expensive after {num_tokens} tokens ({summary}); simplify it")
    return no_token_left(f"the response does not match its grammar after {num_consumed} tokens: {summary}")


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
