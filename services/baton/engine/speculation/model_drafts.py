"""The drafts of a draft model: when it runs, what it has guessed, and how often that was right."""

from collections.abc import Iterable, Mapping, Sequence

from baton.engine.speculation.acceptance import AcceptanceRates, Kind
from baton.engine.speculation.draft_lengths import DraftChoice, StepTimes
from baton.engine.speculation.draft_model import DraftJob, DraftModel
from baton.engine.speculation.model_rounds import ModelCandidate, ModelRounds
from baton.engine.state.require import require
from baton.engine.state.sequence import EngineSequence, max_new_tokens

NAME = "model"


class ModelDrafts:
    """The newest draft of each sequence for which the model has drafted. Used by `Speculation`."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._rounds = ModelRounds()
        self._drafts: dict[int, tuple[int, ...]] = {}
        self._kinds: dict[int, Kind] = {}
        self._paused: set[int] = set()  # keys of sequences that get no drafts until their next token
        self._round_s = 0.0

    def draft_of(self, key: int) -> tuple[Kind, tuple[int, ...]] | None:
        """Return the draft after the last token of a sequence, and its kind; None without one."""
        tokens = self._drafts.get(key)
        return None if tokens is None else (self._kinds[key], tokens)

    def observe(self, seq: EngineSequence, num_new: int, rates: AcceptanceRates) -> None:
        """Compare the draft of a sequence with its `num_new` last tokens."""
        self._paused.discard(seq.key)
        tokens = self._drafts.pop(seq.key, None)
        if tokens is None:
            return
        new = seq.token_ids[len(seq.token_ids) - num_new :]
        num_right = 0
        for guess, token_id in zip(tokens, new, strict=False):
            if guess != token_id:
                break
            num_right += 1
        rates.count(self._kinds[seq.key], num_right, is_wrong=num_right < min(len(tokens), num_new))

    def drop(self, key: int) -> None:
        """Drop the draft of a sequence, and make no other until it has a new token."""
        self._drafts.pop(key, None)
        self._paused.add(key)

    def forget(self, key: int) -> None:
        """Drop what belongs to a sequence that has ended."""
        self._drafts.pop(key, None)
        self._kinds.pop(key, None)
        self._paused.discard(key)
        self.model.forget(key)

    def offer(self, drafts: Mapping[int, tuple[int, ...]], round_s: float) -> None:
        """Take the drafts of a round, which took `round_s` seconds."""
        self._drafts.update(drafts)
        self._round_s = round_s
        self._rounds.has_run()

    def take_round_s(self) -> float:
        """Return how long the round before the present step took; 0 if there was none."""
        round_s, self._round_s = self._round_s, 0.0
        return round_s

    def plan_round(
        self,
        decoding: Sequence[EngineSequence],
        others: Sequence[tuple[EngineSequence, AcceptanceRates]],
        base: DraftChoice,
        times: StepTimes,
        *,
        max_drafts: int,
        max_model_len: int,
        mean_output_tokens: float,
    ) -> tuple[DraftJob, ...]:
        """Return the jobs of the next round, see `Speculation.plan_round`.

        others: those of `decoding` that have no other draft, with the acceptance of their drafts.
        base: the other drafts. max_drafts: beside these.
        """
        costs = self.model.costs
        if costs is None:
            return ()
        self.model.kv.keep_only({seq.key for seq in decoding})
        candidates = list(self._candidates(others, max_model_len, mean_output_tokens))
        jobs = self._rounds.plan(candidates, base, len(decoding), times, costs, max_drafts)
        return jobs or self._rounds.trial(candidates, times, costs)

    def check(self, keys: Iterable[int]) -> None:
        """Check that nothing is kept of sequences other than `keys`. Raises AssertionError. For tests."""
        known = set(keys)
        require(self._kinds.keys() | self._paused <= known, "a draft of a model for a sequence that has ended")
        require(self._drafts.keys() <= self._kinds.keys(), "a draft of unknown kind")
        self.model.check(known)

    def _candidates(
        self, seqs: Sequence[tuple[EngineSequence, AcceptanceRates]], max_model_len: int, mean_output_tokens: float
    ) -> Iterable[ModelCandidate]:
        for seq, rates in seqs:
            left = max_new_tokens(seq, max_model_len)
            most = min(left - 1, self.model.max_model_len - len(seq.token_ids))
            if most < 1 or seq.key in self._paused or not self.model.can_follow(seq):
                continue
            kind = self._kinds.setdefault(seq.key, (NAME, int(not seq.request.sampling.is_greedy)))
            yield ModelCandidate(
                seq=seq,
                rate=rates.rate(kind),
                max_tokens=most,
                num_missing=self.model.kv.num_missing(seq),
                num_left=min(left, mean_output_tokens) if mean_output_tokens else left,
            )
