"""Speculation: keeps the drafts of all decoding sequences, measures their acceptance, and picks those to
verify.

After each step, every drafter guesses how each sequence continues. The guesses are compared with the tokens
that come, whether a step verified them or not. So acceptance is known before a draft is paid for, and stays
known while none is.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from baton.core.kv.block_hash import TokenIds
from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation.acceptance import SEQUENCE_MEMORY, WORKER_MEMORY, AcceptanceRates, Kind
from baton.engine.speculation.draft_lengths import MIN_GAIN, NO_DRAFTS, DraftCandidate, StepTimes, choose_lengths
from baton.engine.speculation.drafter import Draft, Drafter
from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, end_token_ids, max_new_tokens

_NEWEST_WEIGHT = 0.2
"""Weight of the newest step in the averages of what drafts save, and of what planning ahead saves."""


@dataclass(slots=True)
class _SequenceDrafts:
    """Drafts of one sequence after its last token, and their acceptance so far."""

    rates: AcceptanceRates
    drafts: list[tuple[Kind, Draft]] = field(default_factory=list)


class Speculation:
    """Drafts for the sequences of one engine.

    The engine calls `observe` with each new token, `choose` with each step, and `forget` at a sequence's end.
    """

    def __init__(
        self, drafters: Sequence[Drafter], *, forced: ForcedDrafter | None = None, needs_costs: bool = True
    ) -> None:
        """drafters: all drafters; of equal guesses the first counts.

        forced: that of `drafters` which takes forced tokens; None ignores them.
        needs_costs: whether nothing is drafted while step costs are unknown.
        """
        self._drafters = tuple(drafters)
        self._forced = forced
        self._needs_costs = needs_costs
        self._rates = AcceptanceRates(WORKER_MEMORY)
        self._sequences: dict[int, _SequenceDrafts] = {}
        self._saved_s = 0.0
        self._gap_s = 0.0
        self._least_s = 0.0  # gains below it are noise

    def offer_forced(self, key: int, tokens: tuple[int, ...]) -> None:
        """Take the tokens that a grammar forces after those that are observed next."""
        if self._forced is not None:
            self._forced.offer(key, tokens)

    def observe(self, seq: EngineSequence, num_new: int, eos_token_ids: Collection[int]) -> None:
        """Compare the drafts of a sequence with its `num_new` last tokens, and draft the next ones."""
        own = self._sequences.get(seq.key)
        if own is None:
            own = self._sequences[seq.key] = _SequenceDrafts(AcceptanceRates(SEQUENCE_MEMORY, self._rates))
        new = seq.token_ids[len(seq.token_ids) - num_new :]
        for kind, draft in own.drafts:
            _score(own.rates, kind, draft, new)
        ends = end_token_ids(seq.request.sampling, eos_token_ids)
        tenant = seq.request.root_hash
        own.drafts = []
        for drafter in self._drafters:
            drafter.observe(seq.key, seq.token_ids, num_new, tenant)
            new_draft = drafter.draft(seq.key, seq.token_ids, tenant)
            if new_draft is not None and (tokens := _before_end(new_draft.tokens, ends)):
                kind = drafter.name, new_draft.strength
                own.drafts.append((kind, Draft(tokens, new_draft.strength)))

    def drop_drafts(self, key: int) -> None:
        """Let the next step of a sequence have no drafts."""
        if (own := self._sequences.get(key)) is not None:
            own.drafts = []

    def forget(self, key: int) -> None:
        """Drop what belongs to a sequence that has ended."""
        self._sequences.pop(key, None)
        for drafter in self._drafters:
            drafter.forget(key)

    def choose(
        self,
        decoding: Sequence[EngineSequence],
        work: StepWork,
        costs: StepCostModel | None,
        *,
        max_drafts: int,
        max_model_len: int,
    ) -> Mapping[int, tuple[int, ...]]:
        """Return the draft tokens that the next step should verify, by key of the sequence.

        decoding: the sequences that get their next token in the step. work: of the step without drafts.
        costs: None if unknown. max_drafts: most draft tokens of the step.
        """
        found: list[tuple[int, tuple[int, ...]]] = []
        candidates: list[DraftCandidate] = []
        if costs is not None or not self._needs_costs:
            for seq in decoding:
                own = self._sequences.get(seq.key)
                if own is not None and own.drafts and len(seq.sample_indices) == 1:
                    rate, draft = self._best(own)
                    most = min(len(draft.tokens), max_new_tokens(seq, max_model_len) - 1)
                    candidates.append(DraftCandidate(rate, most))
                    found.append((seq.key, draft.tokens))
        choice = NO_DRAFTS
        if candidates:
            times = StepTimes.of(work, costs)
            choice = choose_lengths(candidates, len(decoding), times, max_drafts)
            self._least_s = (MIN_GAIN - 1) * times.plain_s
        self._saved_s += _NEWEST_WEIGHT * (choice.saved_s - self._saved_s)
        return {key: tokens[:length] for (key, tokens), length in zip(found, choice.lengths, strict=True) if length}

    def observe_gap(self, gap_s: float) -> None:
        """Record that the device waited `gap_s` seconds for a step that was not planned ahead."""
        self._gap_s += _NEWEST_WEIGHT * (gap_s - self._gap_s)

    @property
    def saves_more_than_gap(self) -> bool:
        """True if recent drafts saved, or would have saved, more time a step than planning ahead does."""
        return self._saved_s > max(self._gap_s, self._least_s)

    def check(self, keys: Iterable[int]) -> None:
        """Check that nothing is kept of sequences other than `keys`. Raises AssertionError. For tests."""
        require(self._sequences.keys() <= set(keys), "drafts of a sequence that has ended")

    def _best(self, own: _SequenceDrafts) -> tuple[float, Draft]:
        """Return the draft with the most tokens to be expected, and the rate of its kind."""
        rated = [(own.rates.rate(kind), draft) for kind, draft in own.drafts]
        return max(rated, key=lambda one: _expected_tokens(one[0], len(one[1].tokens)))


def _score(rates: AcceptanceRates, kind: Kind, draft: Draft, new: TokenIds) -> None:
    """Count the draft's tokens up to the first wrong one, as far as it is known what came instead."""
    for guess, token_id in zip(draft.tokens, new, strict=False):
        rates.observe(kind, is_right=guess == token_id)
        if guess != token_id:
            return


def _before_end(tokens: tuple[int, ...], end_tokens: Collection[int]) -> tuple[int, ...]:
    """Return the tokens before the first that ends a response: nothing after it would be used."""
    count = next((number for number, token_id in enumerate(tokens) if token_id in end_tokens), len(tokens))
    return tuple(islice(tokens, count))


def _expected_tokens(rate: float, length: int) -> float:
    """Return how many of `length` draft tokens are right on average.

    rate: probability that one is right if those before it are.
    """
    return length if rate >= 1 else rate * (1 - rate**length) / (1 - rate)
