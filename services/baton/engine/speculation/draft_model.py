"""Drafts by a small model of the same tokenizer: the tokens that it would draw itself.

The draft model runs on an `Executor` of its own, before the step that verifies its drafts. It draws with the
request's own sampling parameters and noise, so its drafts are often right for sampled requests, too: a model
that gives the same logits draws the same token.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.kv.block_hash import TokenIds, token_ids
from baton.core.request import Sampling
from baton.core.step_cost import StepCostModel
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.scheduling.step_parts import sample_request
from baton.engine.speculation.draft_kv import DraftKv
from baton.engine.state.sequence import EngineSequence, is_end_token
from baton.engine.state.step import DeviceFault, Executor, StepPlan, StepResult, StepSequence
from baton.runtime.logging import get_logger

log = get_logger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail before the draft model is given up."""


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Work of the draft model for one sequence before a step.

    num_tokens: tokens to compute, the first ones whose KV is missing.
    num_drafts: drafts to make after the last token of the sequence; 0 if other tokens are still missing.
    """

    seq: EngineSequence
    num_tokens: int
    num_drafts: int = 0


@dataclass(slots=True)
class _Drafting:
    """One sequence of a round.

    end: tokens of the sequence that are computed after the first step.
    begin: position of the first of `tokens`, which are computed next.
    history: tokens of the sequence, and the drafts so far.
    """

    job: DraftJob
    sampling: Sampling
    end: int
    begin: int
    tokens: TokenIds
    block_table: tuple[int, ...]
    history: TokenIds
    drafts: list[int] = field(default_factory=list)

    @property
    def key(self) -> int:
        return self.job.seq.key

    def part(self, eos_token_ids: Collection[int]) -> StepSequence:
        """Return its part of the next step of the draft model."""
        sample = None
        if self.job.num_drafts:
            sample = sample_request(self.job.seq, eos_token_ids, num_pending_tokens=len(self.drafts))
            sample = replace(sample, sampling=self.sampling, history=self.history)
        return StepSequence(
            seq_id=self.key,
            token_ids=self.tokens,
            position_begin=self.begin,
            kv_begin=self.begin,
            block_table=self.block_table,
            sample=sample,
        )

    def continue_with(self, token_id: int) -> None:
        """Compute a draft next. No step that reads the history is in flight."""
        self.begin += len(self.tokens)
        self.tokens = token_ids((token_id,))
        if not self.drafts:
            self.history = self.history[:]  # the first one is the engine's own
        self.drafts.append(token_id)
        self.history.append(token_id)


class DraftModel:
    """A draft model, and the KV that it holds of the sequences of one engine. Used from the event loop.

    A sequence of which it cannot compute a token has no drafts until it ends. If several steps in a row fail,
    nothing is drafted any more. Neither changes a response.
    """

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        costs: Callable[[], StepCostModel | None],
        clock: Callable[[], float],
        on_step: Callable[[StepPlan, float], None] = lambda plan, step_s: None,
    ) -> None:
        """executor, pool: of the draft model, used by nobody else.

        vocab_size: of the model that verifies; drafts beyond it are dropped. max_model_len: most tokens that
            the draft model can see.
        eos_token_ids: of the model that verifies.
        costs: what a step of the draft model costs now; None if unknown.
        clock: returns the time in seconds. on_step: called with each step and its duration.
        """
        self.max_model_len = min(max_model_len, pool.num_blocks * pool.block_size_tokens)  # its KV must fit
        self.kv = DraftKv(pool)
        self._executor = executor
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._costs = costs
        self._clock = clock
        self._on_step = on_step
        self._refused: set[int] = set()  # keys of sequences that it cannot follow
        self._num_failed = 0
        self._last_step_id = 0

    @property
    def costs(self) -> StepCostModel | None:
        """Costs of a step now. None if they are unknown, or if the model was given up."""
        return self._costs() if self._num_failed < MAX_FAILED_STEPS else None

    def can_follow(self, seq: EngineSequence) -> bool:
        """Return True if the model can draft for a sequence, once it has computed the tokens so far."""
        is_single = len(seq.sample_indices) == 1
        return is_single and len(seq.token_ids) < self.max_model_len and seq.key not in self._refused

    async def run(self, jobs: Sequence[DraftJob]) -> Mapping[int, tuple[int, ...]]:
        """Compute what the jobs say, and return the drafts by key. Raises DeviceFault.

        The sequences do not change meanwhile. One that gets no blocks has no drafts.
        """
        drafting = list(self._begun(jobs))
        found: dict[int, tuple[int, ...]] = {}
        while drafting:
            result = await self._step([one.part(self._eos_token_ids) for one in drafting])
            if result is None:
                return {}
            unfinished: list[_Drafting] = []
            for one in drafting:
                if one.key in result.failures:
                    self._refuse(one.key)
                elif self._take(one, result):
                    unfinished.append(one)
                elif one.drafts:
                    found[one.key] = tuple(one.drafts)
            drafting = unfinished
        return found

    def forget(self, key: int) -> None:
        """Release what belongs to a sequence that has ended."""
        self.kv.forget(key)
        self._refused.discard(key)

    def check(self, keys: Iterable[int]) -> None:
        """Check that nothing is kept of other sequences. Raises AssertionError. For tests."""
        known = set(keys)
        self.kv.check(known)
        assert self._refused <= known

    def _begun(self, jobs: Sequence[DraftJob]) -> Iterable[_Drafting]:
        for job in jobs:
            seq = job.seq
            begin = len(seq.token_ids) - self.kv.num_missing(seq)
            end = begin + job.num_tokens
            table = self.kv.allocate(seq, end + max(0, job.num_drafts - 1))
            if table is not None:
                sampling = _without_rules(seq.request.sampling)
                yield _Drafting(job, sampling, end, begin, seq.token_ids[begin:end], table, seq.token_ids)

    async def _step(self, parts: Sequence[StepSequence]) -> StepResult | None:
        """Run one step. None if it failed: then the KV of all sequences is dropped."""
        self._last_step_id += 1
        plan = StepPlan(step_id=self._last_step_id, sequences=tuple(parts))
        began_s = self._clock()
        try:
            result = await self._executor.execute(plan)
        except DeviceFault:
            raise
        except Exception as error:
            self._num_failed += 1
            self.kv.keep_only(())
            log.exception(
                "draft_step_failed",
                problem=f"{type(error).__name__}: {error}",
                is_given_up=self._num_failed >= MAX_FAILED_STEPS,
            )
            return None
        self._num_failed = 0
        self._on_step(plan, self._clock() - began_s)
        return result

    def _take(self, one: _Drafting, result: StepResult) -> bool:
        """Take the token that was drawn for a sequence. Returns True if it goes on."""
        self.kv.computed(one.job.seq, one.end, tuple(one.drafts))
        tokens = result.samples.get(one.key, ())
        if not tokens:
            return False
        token_id = tokens[0].token_id
        if token_id >= self._vocab_size or is_end_token(token_id, one.job.seq.request.sampling, self._eos_token_ids):
            return False
        one.continue_with(token_id)
        return len(one.drafts) < one.job.num_drafts

    def _refuse(self, key: int) -> None:
        self.kv.forget(key)
        self._refused.add(key)


def _without_rules(sampling: Sampling) -> Sampling:
    """Return the sampling parameters without what only the verifying model can or must do.

    Grammars and word lists need matchers, and logprobs are not reported.
    """
    if not sampling.is_constrained and sampling.num_logprobs is None:
        return sampling
    return replace(sampling, grammar="", allowed_token_ids=(), bad_words=(), num_logprobs=None)
