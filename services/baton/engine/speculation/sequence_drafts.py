"""The drafts of one sequence, one of each drafter, and what has become of them.

While few sequences decode, every drafter guesses anew after each token, which finds the best drafts. With
many sequences, this work would hold up the step of all. A draft that was right so far then goes on, and a
drafter that found nothing for some time is asked less often.
"""

from collections.abc import Collection, Sequence

from baton.engine.speculation.acceptance import SEQUENCE_MEMORY, AcceptanceRates, Kind
from baton.engine.speculation.drafter import Drafter
from baton.engine.state.sequence import EngineSequence

MANY_SEQUENCES = 8
"""Sequences up to which all drafters guess after each token."""
MIN_LEFT_TOKENS = 6
"""A draft with fewer tokens left is replaced, even with many sequences."""
TOKENS_PER_WAIT = 8
"""Tokens without a guess for which a drafter is left out once more between two questions."""


class DraftSlot:
    """The draft of one drafter, as far as it has turned out right.

    kind: of the draft. tokens: all of its tokens; empty without a draft. num_right: how many of them have
        come.
    """

    __slots__ = ("_drafter", "_num_empty", "_num_unseen", "_wait", "kind", "num_right", "tokens")

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_empty = 0  # tokens in a row for which there was no draft
        self._num_unseen = 0  # tokens at the end of the sequence that the drafter has not observed
        self._wait = 0
        self.kind: Kind = (drafter.name, 0)
        self.num_right = 0
        self.tokens: tuple[int, ...] = ()

    @property
    def num_left(self) -> int:
        """Draft tokens after the last token of the sequence."""
        return len(self.tokens) - self.num_right

    def follow(self, new: tuple[int, ...], rates: AcceptanceRates, *, keeps: bool) -> bool:
        """Compare the draft with the tokens that came. Returns True if it goes on; else it is dropped.

        keeps: whether a draft that was right goes on.
        """
        tokens, begin = self.tokens, self.num_right
        self._num_unseen += len(new)
        if not tokens:
            return False
        end = begin + len(new)
        if tokens[begin:end] == new:
            if keeps and end + MIN_LEFT_TOKENS <= len(tokens):
                self.num_right = end
                return True
            rates.count(self.kind, end, is_wrong=False)
        else:
            num_right, num_known = begin, min(end, len(tokens))
            while num_right < num_known and tokens[num_right] == new[num_right - begin]:
                num_right += 1
            rates.count(self.kind, num_right, is_wrong=num_right < num_known)
        self.tokens = ()
        return False

    def guess(self, seq: EngineSequence, ends: Collection[int], num_seqs: int) -> None:
        """Ask the drafter for a draft after the last token of the sequence, unless it is left out."""
        if self._wait and num_seqs > MANY_SEQUENCES:
            self._wait -= 1
            return
        tenant = seq.request.root_hash
        self._drafter.observe(seq.key, seq.token_ids, self._num_unseen, tenant)
        draft = self._drafter.draft(seq.key, seq.token_ids, tenant)
        self._num_empty = 0 if draft else self._num_empty + self._num_unseen
        self._num_unseen = 0
        self._wait = min(self._num_empty // TOKENS_PER_WAIT, num_seqs // MANY_SEQUENCES)
        if draft is not None:
            self.tokens, self.num_right = before_end(draft.tokens, ends), 0
            self.kind = self._drafter.name, draft.strength

    def end(self, seq: EngineSequence) -> None:
        """Let the drafter learn the last tokens of a sequence that ends, and forget the sequence."""
        if self._drafter.learns and self._num_unseen:
            self._drafter.observe(seq.key, seq.token_ids, self._num_unseen, seq.request.root_hash)
        self._drafter.forget(seq.key)


class SequenceDrafts:
    """The drafts of one sequence after its last token, and their acceptance so far.

    rates: acceptance of its drafts, by kind.
    best, best_rate: the slot from which most tokens are expected, and the acceptance of its kind; None if
        there is no draft.
    """

    __slots__ = ("_ends", "_seq", "best", "best_rate", "rates", "slots")

    def __init__(
        self,
        seq: EngineSequence,
        drafters: Sequence[Drafter],
        ends: Collection[int],
        rates: AcceptanceRates,
    ) -> None:
        """ends: tokens that end a response. rates: of the worker."""
        self._seq = seq
        self._ends = frozenset(ends)
        self.slots = [DraftSlot(drafter) for drafter in drafters]
        self.rates = AcceptanceRates(SEQUENCE_MEMORY, rates)
        self.best: DraftSlot | None = None
        self.best_rate = 0.0

    def observe(self, num_new: int, num_seqs: int) -> None:
        """Compare the drafts with the last `num_new` tokens of the sequence, and draft the next ones.

        num_seqs: sequences that decode beside each other.
        """
        token_ids = self._seq.token_ids
        new = tuple(token_ids[len(token_ids) - num_new :])
        keeps, rates = num_seqs > MANY_SEQUENCES, self.rates
        has_changed = False
        for slot in self.slots:
            had_draft = bool(slot.tokens)
            if not slot.follow(new, rates, keeps=keeps):
                slot.guess(self._seq, self._ends, num_seqs)
                has_changed |= had_draft or bool(slot.tokens)
        if has_changed:
            self.choose_best()

    def choose_best(self) -> None:
        """Find the draft from which most tokens are expected."""
        self.best, most = None, 0.0
        for slot in self.slots:
            if slot.tokens:
                rate = self.rates.rate(slot.kind)
                expected = expected_tokens(rate, slot.num_left)
                if expected > most:
                    self.best, self.best_rate, most = slot, rate, expected

    def drop(self) -> None:
        """Drop all drafts, which say nothing about their acceptance."""
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
