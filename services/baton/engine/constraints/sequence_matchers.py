"""The matchers of one request's sequences. They are a cache: each can be built again from output tokens."""

from collections import OrderedDict

from baton.core.errors import Refused
from baton.core.kv.block_hash import TokenIds
from baton.engine.constraints.compiled_grammar import CompiledGrammar, GrammarMatcher, LexerFull
from baton.engine.constraints.matcher_executor import MatcherExecutor

MAX_MATCHERS = 1024
"""Matchers of one request. A matcher that was dropped is built again."""


class SequenceMatchers:
    """The matchers of one request, by sequence. Used by the thread that holds `compiled.lock`."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._base: GrammarMatcher | None = None
        self._matchers: OrderedDict[int, GrammarMatcher] = OrderedDict()

    def __len__(self) -> int:
        return len(self._matchers)

    def replay(self, outputs: TokenIds, executor: MatcherExecutor) -> None:
        """Prepare for sequences whose response begins with `outputs`, in any thread.

        Raises Refused if it does not match.
        """
        if not outputs:
            return
        with self.compiled.lock:
            self.compiled.renew_if_asked()
            try:
                self._base = self._after(outputs, executor)
            except LexerFull:
                self.compiled.renew()
                self._base = self._after(outputs, executor)

    def after(self, seq_id: int, outputs: TokenIds, executor: MatcherExecutor) -> GrammarMatcher:
        """Return the matcher of a sequence, which has consumed `outputs`.

        If the sequence has a matcher already, it gives back the drafts that were rejected, and consumes only
        new tokens. Raises Refused if they do not match the grammar.
        """
        matcher = self._usable(seq_id, outputs)
        if matcher is None:
            matcher = self._matchers[seq_id] = self._start_of(outputs).copy()
            if len(self._matchers) > MAX_MATCHERS:
                self._matchers.popitem(last=False)
        try:
            matcher.follow(outputs, executor)
        except BaseException:
            self.drop(seq_id)  # a matcher does not recover
            raise
        return matcher

    def without_mask(self, seq_id: int, outputs: TokenIds) -> GrammarMatcher | None:
        """Return the matcher of a sequence if it has no mask after `outputs`, and lacks at most the last of
        them."""
        matcher = self._usable(seq_id, outputs)
        if matcher is None:
            return None
        missing = len(outputs) - len(matcher.consumed)
        return matcher if missing == 1 or (not missing and matcher.mask is None) else None

    def forced_after(self, seq_id: int, outputs: TokenIds, executor: MatcherExecutor) -> tuple[int, ...]:
        """Return the tokens that are forced after `outputs`, in any thread. Waits for no other thread.

        Empty if the grammar is slow or in use, or if `outputs` do not match: then the next mask says why.
        """
        if self.compiled.is_slow or not self.compiled.lock.acquire(blocking=False):
            return ()
        try:
            matcher = self.after(seq_id, outputs, executor)
            matcher.find_forced()
            return matcher.forced
        except Refused:
            return ()
        finally:
            self.compiled.lock.release()

    def drop(self, seq_id: int) -> None:
        """Forget the matcher of a sequence."""
        self._matchers.pop(seq_id, None)

    def _usable(self, seq_id: int, outputs: TokenIds) -> GrammarMatcher | None:
        matcher = self._matchers.get(seq_id)
        if matcher is None or matcher.generation != self.compiled.generation:
            return None
        return matcher if matcher.can_follow(outputs) or matcher.roll_back(outputs) else None

    def _start_of(self, outputs: TokenIds) -> GrammarMatcher:
        base = self._base
        if base is not None and base.generation == self.compiled.generation and base.can_follow(outputs):
            return base
        return self.compiled.start

    def _after(self, outputs: TokenIds, executor: MatcherExecutor) -> GrammarMatcher:
        matcher = self.compiled.start.copy()
        matcher.follow(outputs, executor)
        return matcher
