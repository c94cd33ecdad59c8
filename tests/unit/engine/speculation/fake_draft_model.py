"""A draft model on a fake device, which detects every wrong KV slot, and rounds that do not ask what pays."""

from collections.abc import Coroutine, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

from baton.core.step_cost import StepCostModel, StepWork
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation.draft_model import DraftJob, DraftModel
from baton.engine.speculation.drafter import Drafter
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.sequence import EngineSequence, max_new_tokens
from baton.engine.state.step import SampledToken, SampleRequest, StepPlan, StepResult, StepSequence
from tests.builders import BLOCK_SIZE_TOKENS
from tests.fake_executor import FakeExecutor, FakeGenerationTable
from tests.unit.engine.speculation.reference_drafter import SHARE_OF_RIGHT

T = TypeVar("T")
DRAFT_COSTS = StepCostModel(
    step_s=1e-3, prefill_token_s=1e-5, prefill_attended_s=0, decode_seq_s=1e-5, decode_context_s=0
)


class DraftingExecutor(FakeExecutor):
    """Draws the tokens of the model that verifies, with a share of wrong ones.

    num_steps: steps so far. raising: the numbers of those that raise.
    wrong: what it has found wrong. The draft model survives it, so tests must look here.
    """

    def __init__(self, num_blocks: int, kind: str, rng: Random) -> None:
        table = FakeGenerationTable(num_blocks)
        super().__init__(num_blocks, BLOCK_SIZE_TOKENS, table)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE_TOKENS, table)
        self.num_steps = 0
        self.raising: set[int] = set()
        self.wrong: list[AssertionError] = []
        self._share = SHARE_OF_RIGHT[kind]
        self._rng = rng

    async def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        if self.num_steps in self.raising:
            raise RuntimeError("injected")
        try:
            return self.run(plan)
        except AssertionError as error:
            self.wrong.append(error)
            raise

    def _sample(self, part: StepSequence, sample: SampleRequest) -> tuple[SampledToken, ...]:
        (token,) = super()._sample(part, sample)
        if self._rng.random() < self._share:
            return (token,)
        return (SampledToken(sample_index=token.sample_index, token_id=(token.token_id + 1) % 50),)


def draft_model(
    kind: str = "right", *, num_blocks: int = 64, rng: Random | None = None, eos: Sequence[int] = (), **limits: Any
) -> tuple[DraftModel, DraftingExecutor]:
    """Return a draft model and its device. limits: of `DraftModel`."""
    executor = DraftingExecutor(num_blocks, kind, rng or Random(1))
    settings: dict[str, Any] = {
        "vocab_size": 50,
        "max_model_len": 1000,
        "costs": lambda: DRAFT_COSTS,
        "clock": lambda: 0.0,
    }
    return DraftModel(executor, executor.pool, eos_token_ids=tuple(eos), **(settings | limits)), executor


class EagerRounds(Speculation):
    """Runs rounds of any size, whatever they cost, and verifies a random part of each draft."""

    def __init__(self, model: DraftModel, rng: Random, drafters: Sequence[Drafter] = ()) -> None:
        super().__init__(drafters, model=model, needs_costs=False)
        self._rng = rng
        self.num_pieces = 0

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
        rng, model = self._rng, self.model
        assert model is not None
        if rng.random() < 0.5:
            model.kv.keep_only({seq.key for seq in decoding})
        jobs: list[DraftJob] = []
        for seq in decoding:
            most = min(max_new_tokens(seq, max_model_len) - 1, model.max_model_len - len(seq.token_ids), max_drafts)
            if rng.random() < 0.3 or not model.can_follow(seq):
                continue
            missing = model.kv.num_missing(seq)
            if missing > 6 and rng.random() < 0.7:
                jobs.append(DraftJob(seq, rng.randint(1, missing)))
                self.num_pieces += 1
            elif most > 0:
                jobs.append(DraftJob(seq, missing, rng.randint(1, min(6, most))))
        assert self._model is not None
        for job in jobs:
            self._model._kinds.setdefault(job.seq.key, ("model", 0))
        return tuple(jobs)

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
        assert self._model is not None
        for seq in decoding:
            found = self._model.draft_of(seq.key)
            most = min(max_new_tokens(seq, max_model_len) - 1, max_drafts)
            if found is not None and most > 0 and self._rng.random() < 0.9:
                chosen[seq.key] = found[1][: self._rng.randint(1, most)]
                max_drafts -= len(chosen[seq.key])
        return chosen

    @property
    def saves_more_than_gap(self) -> bool:
        return self._rng.random() < 0.5


def round_jobs(engine: Engine, *, even_with_prompts: bool) -> tuple[DraftJob, ...]:
    """Return the jobs of the next round.

    even_with_prompts: also while prompts wait. An engine does not do that, but with it there are more rounds.
    """
    drafts = engine.drafts
    assert drafts is not None
    jobs = drafts.plan_round()
    if even_with_prompts:
        running = engine._sequences.running.values()
        jobs = drafts._speculation.plan_round(
            [seq for seq in running if seq.num_uncomputed_tokens == 1 and not seq.request.prefill_only],
            StepWork(),
            None,
            max_drafts=24,
            max_model_len=engine.config.max_model_len,
            mean_output_tokens=0.0,
        )
    return jobs


def run_round(engine: Engine, *, even_with_prompts: bool = False) -> Mapping[int, tuple[int, ...]]:
    """Run the draft model before the next step, as the loop does. Returns its drafts."""
    drafts = engine.drafts
    assert drafts is not None
    assert drafts.model is not None
    if not (jobs := round_jobs(engine, even_with_prompts=even_with_prompts)):
        return {}
    found = finished(drafts.model.run(jobs))
    drafts.offer_round(found, 1e-4)
    return found


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only yields to other tasks, without an event loop."""
    try:
        while True:
            work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
