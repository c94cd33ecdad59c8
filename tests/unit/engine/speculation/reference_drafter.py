"""A drafter that knows the answers, and a speculation that verifies drafts whether they pay or not."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from baton.core.kv.block_hash import BlockHash, TokenIds
from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.speculation.drafter import MAX_DRAFT_TOKENS, Draft
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.sequence import EngineSequence, max_new_tokens

SHARE_OF_RIGHT = {"right": 1.0, "wrong": 0.0, "random": 0.7}
"""Share of right tokens in the drafts of each kind of drafter."""


class ReferenceDrafter:
    """Drafts from known answers, with a share of wrong tokens. Beyond the end of an answer it guesses on.

    find: returns a sequence by its key.
    answer_of: returns all output tokens of a sample.
    """

    name = "reference"
    learns = False

    def __init__(
        self,
        kind: str,
        rng: Random,
        find: Callable[[int], EngineSequence | None],
        answer_of: Callable[[EngineSequence], Sequence[int]],
        vocab_size: int,
    ) -> None:
        self._share = SHARE_OF_RIGHT[kind]
        self._rng = rng
        self._find = find
        self._answer_of = answer_of
        self._vocab_size = vocab_size
        self.known: set[int] = set()

    def observe(self, key: int, token_ids: TokenIds, num_new: int, tenant: BlockHash) -> None:
        self.known.add(key)

    def draft(self, key: int, token_ids: TokenIds, tenant: BlockHash) -> Draft | None:
        seq, rng = self._find(key), self._rng
        assert seq is not None
        assert seq.token_ids == token_ids
        rest = [*self._answer_of(seq)[seq.num_output_tokens :], *(rng.randrange(self._vocab_size) for _ in range(3))]
        length = rng.randint(1, MAX_DRAFT_TOKENS)
        drafts = (t if rng.random() < self._share else (t + 1) % self._vocab_size for t in rest[:length])
        return Draft(tuple(drafts), rng.randrange(3))

    def forget(self, key: int) -> None:
        self.known.discard(key)


class EagerSpeculation(Speculation):
    """Verifies a random part of each draft, whatever it costs."""

    def __init__(self, drafter: ReferenceDrafter, rng: Random) -> None:
        super().__init__([drafter], needs_costs=False)
        self._rng = rng
        self.drafter = drafter

    def choose(
        self,
        decoding: Sequence[EngineSequence],
        work: StepWork,
        costs: StepCostModel | None,
        *,
        max_drafts: int,
        max_model_len: int,
    ) -> Mapping[int, tuple[int, ...]]:
        chosen: dict[int, tuple[int, ...]] = {}
        for seq in decoding:
            own = self._sequences.get(seq.key)
            if own is None or own.best is None or len(seq.sample_indices) > 1:
                continue
            tokens = own.best_tokens
            most = min(len(tokens), max_drafts, max_new_tokens(seq, max_model_len) - 1)
            if count := self._rng.randint(0, most):
                chosen[seq.key] = tokens[:count]
                max_drafts -= count
        return chosen

    @property
    def saves_more_than_gap(self) -> bool:
        return self._rng.random() < 0.5
