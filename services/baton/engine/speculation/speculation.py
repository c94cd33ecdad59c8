"""Speculation: keeps the drafts of all decoding sequences, measures their acceptance, and picks those to
verify.

After each step, the drafters guess how each sequence continues. The guesses are compared with the tokens that
come, whether a step verified them or not. So acceptance is known before a draft is paid for, and stays known
while none is. Drafts of a model are the exception: they are computed only if they are expected to pay.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation.acceptance import WORKER_MEMORY, AcceptanceRates
from baton.engine.speculation.draft_lengths import MIN_GAIN, NO_DRAFTS, DraftCandidate, StepTimes, choose_lengths
from baton.engine.speculation.draft_model import DraftJob, DraftModel
from baton.engine.speculation.drafter import Drafter
from baton.engine.speculation.forced_drafter import ForcedDrafter
from baton.engine.speculation.model_drafts import ModelDrafts
from baton.engine.speculation.sequence_drafts import SequenceDrafts
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, end_token_ids, max_new_tokens

_NEWEST_WEIGHT = 0.2
"""Weight of the newest step in the averages of what drafts save, and of what planning ahead saves."""


class Speculation:
    """Drafts for the sequences of one engine.

    The engine calls `observe` with each new token, `choose` with each step, and `forget` at a sequence's end.
    With a draft model it calls `plan_round` before each step, and `offer_round` with the result.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        forced: ForcedDrafter | None = None,
        model: DraftModel | None = None,
        needs_costs: bool = True,
    ) -> None:
        """drafters: all drafters; of equal guesses the first counts.

        forced: that of `drafters` which takes forced tokens; None ignores them.
        model: drafts for sequences for which no other draft pays; None if there is none.
        needs_costs: whether nothing is drafted while step costs are unknown.
        """
        self._drafters = tuple(drafters)
        self._forced = forced
        self._needs_costs = needs_costs
        self._rates = AcceptanceRates(WORKER_MEMORY)
        self._sequences: dict[int, SequenceDrafts] = {}
        self._model = None if model is None else ModelDrafts(model)
        self._saved_s = 0.0
        self._gap_s = 0.0
        self._least_s = 0.0  # gains below it are noise

    @property
    def model(self) -> DraftModel | None:
        """The draft model, if there is one."""
        return None if self._model is None else self._model.model

    def offer_forced(self, key: int, position: int, tokens: tuple[int, ...]) -> None:
        """Take the tokens that a grammar forces from `position` on, once a sequence has the tokens before."""
        if self._forced is not None and tokens:
            self._forced.offer(key, position, tokens)
            if (own := self._sequences.get(key)) is not None:
                own.is_offered = True

    def observe(self, seq: EngineSequence, num_new: int, eos_token_ids: Collection[int]) -> None:
        """Compare the drafts of a sequence with its `num_new` last tokens, and draft the next ones."""
        own = self._sequences.get(seq.key)
        if own is None:
            ends = end_token_ids(seq.request.sampling, eos_token_ids)
            own = self._sequences[seq.key] = SequenceDrafts(seq, self._drafters, ends, self._rates, num_new)
        own.observe(num_new, len(self._sequences))
        if self._model is not None:
            self._model.observe(seq, num_new, own.rates)

    def drop_drafts(self, key: int) -> None:
        """Let the next step of a sequence have no drafts."""
        if (own := self._sequences.get(key)) is not None:
            own.drop()
        if self._model is not None:
            self._model.drop(key)

    def forget(self, key: int) -> None:
        """Drop what belongs to a sequence that has ended."""
        if (own := self._sequences.pop(key, None)) is not None:
            own.end()
        if self._forced is not None:
            self._forced.forget(key)
        if self._model is not None:
            self._model.forget(key)

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
        keys, tokens, candidates = self._candidates(decoding, costs, max_model_len)
        choice = NO_DRAFTS
        if candidates:
            times = StepTimes.of(work, costs)
            choice = choose_lengths(candidates, len(decoding), times, max_drafts)
            self._least_s = (MIN_GAIN - 1) * times.plain_s
        round_s = 0.0 if self._model is None else self._model.take_round_s()
        self._saved_s += _NEWEST_WEIGHT * (choice.saved_s - round_s - self._saved_s)
        if not choice.num_drafts:
            return {}
        return {key: own[:length] for key, own, length in zip(keys, tokens, choice.lengths, strict=True) if length}

    def drafter_of(self, key: int) -> str:
        """Return the name of the drafter whose drafts `choose` has returned last for a sequence.

        Call it before the tokens in their place are observed.
        """
        found = None if self._model is None else self._model.draft_of(key)
        if found is not None:
            return found[0][0]
        best = self._sequences[key].best
        assert best is not None
        return best.kind[0]

    def tokens_per_step(self, key: int, usual: float) -> float:
        """Return how many tokens recent steps gave a sequence. `usual`: those of sequences in the mean."""
        own = self._sequences.get(key)
        return usual if own is None else own.tokens_per_step(usual)

    def plan_round(
        self,
        decoding: Sequence[EngineSequence],
        work: StepWork,
        costs: StepCostModel | None,
        *,
        max_drafts: int,
        max_model_len: int,
        mean_output_tokens: float,
    ) -> tuple[DraftJob, ...]:
        """Return what the draft model should compute before the next step; mostly nothing without a gain.

        Arguments as in `choose`. mean_output_tokens: mean length of recent responses, 0 if unknown.
        """
        if self._model is None or costs is None:
            return ()
        keys, _, candidates = self._candidates(decoding, costs, max_model_len, with_model=False)
        times = StepTimes.of(work, costs)
        base = choose_lengths(candidates, len(decoding), times, max_drafts)
        served = {key for key, length in zip(keys, base.lengths, strict=True) if length}
        others = [(seq, own.rates) for seq in decoding if (own := self._of(seq, served)) is not None]
        return self._model.plan_round(
            decoding,
            others,
            base,
            times,
            max_drafts=max_drafts - base.num_drafts,
            max_model_len=max_model_len,
            mean_output_tokens=mean_output_tokens,
        )

    def offer_round(self, drafts: Mapping[int, tuple[int, ...]], round_s: float) -> None:
        """Take the drafts of a round of the draft model, which took `round_s` seconds."""
        if self._model is not None:
            self._model.offer({key: tokens for key, tokens in drafts.items() if key in self._sequences}, round_s)

    def observe_gap(self, gap_s: float) -> None:
        """Record that the device waited `gap_s` seconds for a step that was not planned ahead."""
        self._gap_s += _NEWEST_WEIGHT * (gap_s - self._gap_s)

    @property
    def saves_more_than_gap(self) -> bool:
        """True if recent drafts saved, or would have saved, more time a step than planning ahead does."""
        return self._saved_s > max(self._gap_s, self._least_s)

    def check(self, keys: Iterable[int]) -> None:
        """Check that nothing is kept of sequences other than `keys`. Raises AssertionError. For tests."""
        known = set(keys)
        require(self._sequences.keys() <= known, "drafts of a sequence that has ended")
        if self._model is not None:
            self._model.check(known)

    def _of(self, seq: EngineSequence, served: Collection[int]) -> SequenceDrafts | None:
        return None if seq.key in served else self._sequences.get(seq.key)

    def _candidates(
        self,
        decoding: Sequence[EngineSequence],
        costs: StepCostModel | None,
        max_model_len: int,
        *,
        with_model: bool = True,
    ) -> tuple[list[int], list[tuple[int, ...]], list[DraftCandidate]]:
        """Return keys, draft tokens and candidates of the sequences that have a draft."""
        keys: list[int] = []
        tokens: list[tuple[int, ...]] = []
        candidates: list[DraftCandidate] = []
        if costs is None and self._needs_costs:
            return keys, tokens, candidates
        model = self._model if with_model else None
        for seq in decoding:
            own = self._sequences.get(seq.key)
            found = None if model is None else model.draft_of(seq.key)
            if found is not None and own is not None:
                rate, draft = own.rates.rate(found[0]), found[1]
            elif own is not None and own.best is not None:
                rate, draft = own.best_rate, own.best_tokens
            else:
                continue
            most = max_new_tokens(seq, max_model_len) - 1
            if most > 0 and len(seq.sample_indices) == 1:
                keys.append(seq.key)
                tokens.append(draft)
                candidates.append((rate, min(len(draft), most), len(seq.token_ids)))
        return keys, tokens, candidates
