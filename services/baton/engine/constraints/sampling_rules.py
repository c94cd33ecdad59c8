"""The rules of one request that forbid tokens, prepared for use at every token."""

from collections import OrderedDict
from concurrent.futures import Future

from baton.core.errors import Reason, Refused, invalid
from baton.core.kv.block_hash import TokenIds
from baton.core.request import Sampling
from baton.engine.constraints.bad_words import BadWords
from baton.engine.constraints.compiled_grammar import CompiledGrammar, GrammarMatcher
from baton.engine.constraints.grammar_tokenizer import GrammarTokenizer
from baton.engine.constraints.token_bits import Bits, bits_of

MAX_MATCHERS = 1024
"""Matchers of one request. A matcher that was dropped is built again from the output tokens."""


class SamplingRules:
    """The prepared rules of one `Sampling`, and the matchers of its sequences.

    sampling: kept, because rules are found by its identity.
    allowed: bits of `allowed_token_ids`; None allows all.
    bad_words: None if there are none.
    inside_bits: tokens that a grammar may contain: all but the end tokens of the model.
    end_bits: end tokens that may be drawn where the grammar accepts, and only there.
    tokenizer: None without a grammar.
    pending: (number of output tokens, mask that is being computed), by sequence.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_compiled",
        "_matchers",
        "_start",
        "allowed",
        "bad_words",
        "end_bits",
        "inside_bits",
        "pending",
        "sampling",
        "tokenizer",
    )

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: GrammarTokenizer | None = None,
        compiled: CompiledGrammar | None = None,
    ) -> None:
        self.sampling = sampling
        self.tokenizer = tokenizer
        self.allowed: Bits | None = None
        if sampling.allowed_token_ids:
            self.allowed = bits_of(sampling.allowed_token_ids, vocab_size)
        self.bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self.inside_bits = self.end_bits = bits_of((), vocab_size)
        if tokenizer is not None:
            self.inside_bits = tokenizer.known & ~(tokenizer.end_marks | bits_of(eos_token_ids, vocab_size))
            eos = () if sampling.ignore_eos else eos_token_ids
            stops = (t for t in sampling.stop_token_ids if t in eos_token_ids or tokenizer.is_special(t))
            self.end_bits = bits_of([t for t in {*eos, *stops} if t < vocab_size], vocab_size) & tokenizer.known
        self._compiled = compiled
        self._start = self._base = None if compiled is None else compiled.start
        self.pending: dict[int, tuple[int, Future[None]]] = {}
        self._matchers: OrderedDict[int, GrammarMatcher] = OrderedDict()

    @property
    def num_fast_masks(self) -> int:
        """Masks of the grammar in a row that were fast."""
        return self._compiled.num_fast_masks if self._compiled is not None else 0

    def count_fast_mask(self, is_fast: bool) -> None:
        """Count a mask of the grammar. A slow one sets the count to zero."""
        if self._compiled is not None:
            self._compiled.num_fast_masks = self._compiled.num_fast_masks + 1 if is_fast else 0

    def replay(self, outputs: TokenIds) -> None:
        """Prepare for sequences whose response begins with `outputs`. Raises Refused if it does not match."""
        if self._compiled is not None and self.tokenizer is not None and outputs:
            with self._compiled.lock:
                base = self._compiled.start.copy()
                base.follow(outputs)
                base.keep_mask(self.tokenizer)
                self._base = base

    def compute_ahead(self, seq_id: int, outputs: TokenIds) -> None:
        """Let the matcher of a sequence consume `outputs` and compute the mask, in any thread."""
        if self._compiled is not None and self.tokenizer is not None:
            with self._compiled.lock:
                matcher = self.matcher_after(seq_id, outputs)
                if matcher is not None:
                    matcher.keep_mask(self.tokenizer)

    def matcher_after(self, seq_id: int, outputs: TokenIds) -> GrammarMatcher | None:
        """Return the matcher of a sequence, which has consumed `outputs`; None without a grammar.

        Only new tokens are consumed if the sequence has a matcher already. Raises Refused if they do not
        match the grammar.
        """
        if self._start is None or self._base is None:
            return None
        matcher = self._matchers.get(seq_id)
        if matcher is None or not matcher.can_follow(outputs):
            base = self._base if self._base.can_follow(outputs) else self._start
            matcher = self._matchers[seq_id] = base.copy()
            if len(self._matchers) > MAX_MATCHERS:
                self._matchers.popitem(last=False)
        try:
            matcher.follow(outputs)
        except Refused:
            del self._matchers[seq_id]  # a matcher does not recover
            raise
        return matcher


def check_rules(sampling: Sampling, vocab_size: int) -> None:
    """Raise Refused if a rule names a token id that the model does not have, or an empty bad word."""
    if max(sampling.allowed_token_ids, default=0) >= vocab_size:
        raise _unknown("allowed_token_ids", max(sampling.allowed_token_ids), vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise invalid("bad_words has an empty entry; remove it")
        if max(word) >= vocab_size:
            raise _unknown("bad_words", max(word), vocab_size)


def no_grammar_support(why: str) -> Refused:
    """Return the refusal of a grammar by a worker that has no table of its tokenizer."""
    return invalid(f"this worker supports no grammars: {why}", Reason.INVALID_GRAMMAR)


def _unknown(field: str, token_id: int, vocab_size: int) -> Refused:
    return invalid(f"{field} has token id {token_id}; the model has ids below {vocab_size}")
