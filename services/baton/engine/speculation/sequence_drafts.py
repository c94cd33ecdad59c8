"""The drafts of one sequence, one of each drafter, and what has become of them.

While few sequences decode, every drafter guesses anew after each token, which finds the best drafts. With
many sequences, this work would hold up the step of all. A draft that was right so far then goes on, and a
drafter that found nothing for some time is asked less often.
"""

from collections.abc import Collection, Sequence

from baton.core.kv.block_hash import TokenIds
from baton.engine.speculation.acceptance import SEQUENCE_MEMORY, AcceptanceRates, Kind
from baton.engine.speculation.drafter import Drafter
from baton.engine.state.sequence import EngineSequence

MANY_SEQUENCES = 8
"""Sequences up to which all drafters guess after each token."""
MIN_LEFT_TOKENS = 6
"""A draft with fewer tokens left is replaced, even with many sequences."""
STEPS_KEPT = 1 - 1 / 24
"""Share of the weight of earlier steps that is left after a step, in the average of the tokens of a step."""
KNOWN_STEPS = 4.0
"""Least weighted number of steps of such an average."""
TOKENS_PER_WAIT = 8
"""Tokens without a guess for which a drafter is left out for one more token between two questions."""


class DraftSlot:
    """The draft of one drafter for one sequence.

    kind: of the draft. tokens: all of its tokens; empty without a draft.
    begin: position of the first of them in the sequence.
    ask_at: length of the sequence from which the drafter is asked again, if there is no draft.
    """

    __slots__ = ("_drafter", "_num_empty", "_num_seen", "ask_at", "begin", "kind", "tokens")

    def __init__(self, drafter: Drafter, num_seen: int) -> None:
        """num_seen: tokens of the sequence that the drafter need not learn: those of its prompt."""
        self._drafter = drafter
        self._num_empty = 0  # tokens in a row for which there was no draft
        self._num_seen = num_seen
        self.ask_at = 0
        self.kind: Kind = (drafter.name, 0)
        self.begin = 0
        self.tokens: tuple[int, ...] = ()

    def goes_on(self, token_ids: TokenIds, num_new: int) -> bool:
        """Return True if the last `num_new` tokens are those of the draft, and enough of it is left."""
        end = len(token_ids)
        offset = end - self.begin
        if offset + MIN_LEFT_TOKENS > len(self.tokens):
            return False
        if num_new == 1:
            return self.tokens[offset - 1] == token_ids[-1]
        return self.tokens[offset - num_new : offset] == tuple(token_ids[end - num_new :])

    def settle(self, token_ids: TokenIds, rates: AcceptanceRates, *, keeps: bool) -> None:
        """Compare the draft with the tokens that came. It is dropped unless it was right and `keeps`."""
        tokens, num_known = self.tokens, len(token_ids) - self.begin
        if not tokens or not num_known:
            return
        came = token_ids[self.begin : self.begin + len(tokens)]
        num_right = 0
        for guess, token_id in zip(tokens, came, strict=False):
            if guess != token_id:
                break
            num_right += 1
        is_wrong = num_right < len(came)
        if is_wrong or not keeps or num_known + MIN_LEFT_TOKENS > len(tokens):
            rates.count(self.kind, num_right, is_wrong=is_wrong)
            self.tokens = ()

    def guess(self, seq: EngineSequence, ends: Collection[int], num_seqs: int) -> None:
        """Ask the drafter for a draft after the last token of the sequence."""
        tenant, end = seq.request.root_hash, len(seq.token_ids)
        num_new = end - self._num_seen
        self._drafter.observe(seq.key, seq.token_ids, num_new, tenant)
        self._num_seen = end
        draft = self._drafter.draft(seq.key, seq.token_ids, tenant)
        if draft is None:
            self._num_empty += num_new
            waits = num_seqs // MANY_SEQUENCES if num_seqs > MANY_SEQUENCES else 0
            self.ask_at = end + 1 + min(self._num_empty // TOKENS_PER_WAIT, waits)
            return
        self._num_empty = 0
        self.tokens, self.begin = before_end(draft.tokens, ends), end
        self.kind = self._drafter.name, draft.strength

    def end(self, seq: EngineSequence) -> None:
        """Let the drafter learn the last tokens of a sequence that ends, and forget the sequence."""
        num_new = len(seq.token_ids) - self._num_seen
        if self._drafter.learns and num_new:
            self._drafter.observe(seq.key, seq.token_ids, num_new, seq.request.root_hash)
        self._drafter.forget(seq.key)


class SequenceDrafts:
    """The drafts of one sequence after its last token, and their acceptance so far.

    rates: acceptance of its drafts, by kind.
    best, best_rate: the slot from which most tokens are expected, and the acceptance of its kind; None if
        there is no draft.
    is_offered: a drafter has a new draft, which it was not asked for.
    """

    __slots__ = (
        "_ask_at",
        "_ends",
        "_num_steps",
        "_num_tokens",
        "_seq",
        "best",
        "best_rate",
        "is_offered",
        "rates",
        "slots",
    )

    def __init__(
        self,
        seq: EngineSequence,
        drafters: Sequence[Drafter],
        ends: Collection[int],
        rates: AcceptanceRates,
        num_new: int,
    ) -> None:
        """ends: tokens that end a response. rates: of the worker. num_new: tokens that were not observed."""
        self._seq = seq
        self._ends = frozenset(ends)
        self._ask_at = 0
        self._num_steps = self._num_tokens = 0.0  # exponential averages
        self.slots = [DraftSlot(drafter, len(seq.token_ids) - num_new) for drafter in drafters]
        self.rates = AcceptanceRates(SEQUENCE_MEMORY, rates)
        self.best: DraftSlot | None = None
        self.best_rate = 0.0
        self.is_offered = False

    @property
    def best_tokens(self) -> tuple[int, ...]:
        """The tokens of the best draft that are left."""
        best = self.best
        return () if best is None else best.tokens[len(self._seq.token_ids) - best.begin :]

    def observe(self, num_new: int, num_seqs: int) -> None:
        """Compare the drafts with the last `num_new` tokens of the sequence, and draft the next ones.

        Call it once for each step that gives the sequence tokens.
        num_seqs: sequences that decode at the same time.
        """
        self._num_steps = self._num_steps * STEPS_KEPT + 1
        self._num_tokens = self._num_tokens * STEPS_KEPT + num_new
        seq = self._seq
        token_ids = seq.token_ids
        is_one_of_many = num_seqs > MANY_SEQUENCES
        if is_one_of_many and not self.is_offered:
            best = self.best
            if len(token_ids) < self._ask_at if best is None else best.goes_on(token_ids, num_new):
                return
        is_offered, self.is_offered = self.is_offered, False
        for slot in self.slots:  # all of them, also those that are not asked: a wrong draft must not be chosen
            slot.settle(token_ids, self.rates, keeps=is_one_of_many)
        for slot in self.slots:
            if not slot.tokens and (is_offered or len(token_ids) >= slot.ask_at):
                slot.guess(seq, self._ends, num_seqs)
            if is_one_of_many and len(slot.tokens) > MIN_LEFT_TOKENS:
                break  # the others are asked when this draft ends
        self.choose_best()

    def tokens_per_step(self, usual: float) -> float:
        """Return how many tokens recent steps gave it. `usual`: what counts while little is known of it."""
        return usual if self._num_steps < KNOWN_STEPS else self._num_tokens / self._num_steps

    def choose_best(self) -> None:
        """Find the draft from which most tokens are expected."""
        self.best, most, end = None, 0.0, len(self._seq.token_ids)
        for slot in self.slots:
            num_left = slot.begin + len(slot.tokens) - end
            if num_left > 0:
                rate = self.rates.rate(slot.kind)
                expected = expected_tokens(rate, num_left)
                if expected > most:
                    self.best, self.best_rate, most = slot, rate, expected
        self._ask_at = min(slot.ask_at for slot in self.slots) if self.slots else 0

    def drop(self) -> None:
        """Drop all drafts, which says nothing about their acceptance."""
        for slot in self.slots:
            slot.tokens = ()
        self.best = None

    def end(self) -> None:
        """Let the drafters forget the sequence, which has ended."""
        for slot in self.slots:
            slot.end(self._seq)


def before_end(tokens: tuple[int, ...], ends: Collection[int]) -> tuple[int, ...]:
    """Return the tokens before the first that ends a response: nothing after it would be used."""
    for number, token_id in enumerate(tokens):
        if token_id in ends:
            return tokens[:number]
    return tokens


def expected_tokens(rate: float, length: int) -> float:
    """Return how many of `length` draft tokens are right on average.

    rate: probability that one is right if those before it are.
    """
    return length if rate >= 1 else rate * (1 - rate**length) / (1 - rate)
