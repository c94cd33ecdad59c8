"""Runs random requests on an engine step by step, with or without drafts, and records every token."""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton.core.errors import Reason
from baton.core.step_cost import StepCostModel
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation.draft_model import DraftModel
from baton.engine.speculation.modes import open_speculation
from baton.engine.speculation.speculation import Speculation
from baton.engine.state.outcome import EngineOutcome
from baton.engine.state.sequence import EngineSequence, SequenceRequest
from baton.engine.state.step import SampledToken, StepPlan, StepResult
from tests.builders import BLOCK_SIZE_TOKENS, sequence_request
from tests.fake_executor import FakeGenerationTable
from tests.unit.engine.speculation.byte_grammars import EOS, GRAMMARS, TOKENS, VOCAB_SIZE, ids
from tests.unit.engine.speculation.fake_draft_model import EagerRounds, round_jobs
from tests.unit.engine.speculation.reference_drafter import EagerSpeculation, ReferenceDrafter

RunStep = Callable[[StepPlan], Awaitable[StepResult]]
COSTS = StepCostModel(
    step_s=0.01, prefill_token_s=1e-4, prefill_attended_s=0, decode_seq_s=1e-4, decode_context_s=0, draft_token_s=1e-4
)
NUM_BLOCKS = 16


@dataclass
class Recorded:
    """tokens: of one sample, in order. end: its finish reason, or the reason of its failure."""

    tokens: list[SampledToken] = field(default_factory=list)
    end: object = None


Answers = Mapping[tuple[int, int], Recorded]
"""By `seq_id` and sample index."""


class DraftedRun:
    """One engine over a device. `num_steps`: steps so far."""

    def __init__(self, run_step: RunStep, num_blocks: int, speculation: Speculation | None = None) -> None:
        config = EngineConfig(
            max_num_batched_tokens=40, max_num_seqs=5, max_model_len=60, block_size_tokens=BLOCK_SIZE_TOKENS,
            eos_token_ids=(EOS,), max_waiting_seqs=1000,
        )  # fmt: skip
        self.pool = BlockPool(num_blocks, BLOCK_SIZE_TOKENS, FakeGenerationTable(num_blocks))
        self.engine = Engine(config, self.pool, clock=lambda: 0.0, step_costs=lambda: COSTS, speculation=speculation)
        self.answers: dict[tuple[int, int], Recorded] = defaultdict(Recorded)
        self.cancelled: set[tuple[int, int]] = set()
        self.num_steps = 0
        self._run_step = run_step

    async def run(self, requests: Iterable[SequenceRequest], rng: Random) -> None:
        """Add requests at random times, cancel some, and run until all have ended."""
        waiting = list(requests)[::-1]
        while waiting or not self.engine.is_idle:
            while waiting and (self.engine.is_idle or rng.random() < 0.3):
                self.engine.add(waiting.pop())
            await self._steps(rng)
            if rng.random() < 0.04:
                self._cancel(rng)
        self.engine.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total, counts

    async def _steps(self, rng: Random) -> None:
        """Run one step, after a round of the draft model, and steps that are planned ahead of it."""
        drafts = self.engine.drafts
        if drafts is not None and drafts.model is not None:
            drafts.offer_round(await drafts.model.run(round_jobs(self.engine, even_with_prompts=True)), 1e-3)
            self.engine.check()
        plan = self.engine.plan()
        self._note(self.engine.take_outcome())
        while not plan.is_empty:
            self.num_steps += 1
            self.engine.check()
            following = self.engine.plan_ahead(plan) if rng.random() < 0.5 else None
            self._note(self.engine.apply(plan, await self._run_step(plan)))
            self.engine.check()
            if following is None or following.is_empty:
                return
            plan = following

    def _cancel(self, rng: Random) -> None:
        seqs = list(self.engine._sequences.all_by_request())
        if seqs:
            seq = rng.choice(seqs)
            self.cancelled |= {(seq.seq_id, i) for i in seq.sample_indices}
            self.engine.cancel(seq.seq_id, seq.sample_indices)
            self.engine.check()

    def _note(self, outcome: EngineOutcome) -> None:
        for output in outcome.outputs:
            recorded = self.answers[output.seq_id, output.sample_index]
            assert recorded.end is None
            assert output.output_index == len(recorded.tokens)
            recorded.tokens += output.tokens
            recorded.end = output.finish or (output.failure and output.failure.reason)


def random_requests(rng: Random, count: int) -> list[SequenceRequest]:
    """Return requests of all kinds, some with repetitive prompts."""
    return [_random_request(rng, number) for number in range(1, count + 1)]


def _random_request(rng: Random, seq_id: int) -> SequenceRequest:
    words = [ids(b"abc"), ids(b'{"name":"'), [TOKENS.index(b"ab"), 5, 6]]
    prompt = [token for _ in range(rng.randint(1, 3)) for token in rng.choice(words)]
    sampling: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 1.0, 0.7)),
        "top_k": rng.choice((0, 0, 8)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": rng.randrange(1000),
        "min_tokens": rng.choice((0, 0, 4)),
        "stop_token_ids": rng.choice(((), (), (7, *ids(b";")), tuple(range(20, 60)))),
        "ignore_eos": rng.random() < 0.3,
        "num_logprobs": rng.choice((None, None, 0, 3)),
    }
    kind = rng.choice(("plain", "plain", "penalties", "grammar", "grammar", "words"))
    if kind == "penalties":
        sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}
        sampling |= {"logit_bias": ((30, 2.5), (31, 2.0))}
    elif kind == "grammar":
        sampling |= {"grammar": rng.choice(GRAMMARS)}
    elif kind == "words":
        few = tuple(sorted(rng.sample(range(1, VOCAB_SIZE), 12)))
        sampling |= {"allowed_token_ids": few, "bad_words": tuple((few[0], other) for other in few[:6])}
    return sequence_request(
        seq_id,
        prompt[:12],
        max_tokens=rng.randint(1, 24),
        sampling=sampling,
        sample_indices=tuple(range(rng.choice((1, 1, 1, 3)))),
        priority=rng.choice((0, 0, 1)),
    )


async def reference(run_step: RunStep, requests: Sequence[SequenceRequest]) -> Answers:
    """Return the answers of requests that run one after the other, without drafts, cache and preemption."""
    answers: dict[tuple[int, int], Recorded] = {}
    for request in requests:
        run = DraftedRun(run_step, 64)
        run.engine.add(request)
        while not run.engine.is_idle:
            await run._steps(Random(0))
        answers.update(run.answers)
    return answers


async def assert_same_answers(
    kind: str,
    run_step: RunStep,
    requests: Sequence[SequenceRequest],
    expected: Answers,
    rng: Random,
    tolerance: float,
    *,
    new_drafter: type[ReferenceDrafter] = ReferenceDrafter,
    model: DraftModel | None = None,
) -> DraftedRun:
    """Run requests with drafts of a kind in a small pool, and compare all tokens, logprobs and ends.

    tolerance: of logprobs. Cancelled samples may be shorter. model: drafts instead of the drafter.
    """

    def find(key: int) -> EngineSequence | None:
        return next((seq for seq in run.engine._sequences.all_by_request() if seq.key == key), None)

    def answer_of(seq: EngineSequence) -> list[int]:
        return [token.token_id for token in expected[seq.seq_id, seq.sample_indices[0]].tokens]

    speculation: Speculation | None = open_speculation("auto")
    if model is not None:
        speculation = EagerRounds(model, rng)
    elif kind != "auto":
        speculation = EagerSpeculation(new_drafter(kind, rng, find, answer_of, VOCAB_SIZE), rng)
    run = DraftedRun(run_step, NUM_BLOCKS, speculation)
    await run.run(requests, rng)
    ends_early = _failed_with_siblings(expected)
    for sample, known in expected.items():
        found = run.answers[sample]
        what = f"{kind}, sample {sample}"
        count = len(found.tokens) if sample in run.cancelled else len(known.tokens)
        if sample in ends_early:
            count = min(len(found.tokens), len(known.tokens))
        compared = found.tokens[:count] if sample in ends_early else found.tokens
        assert [t.token_id for t in compared] == [t.token_id for t in known.tokens[:count]], what
        assert found.end == known.end or sample in run.cancelled | ends_early, what
        _assert_same_logprobs(found.tokens, known.tokens, tolerance)
    for seq_id in {seq_id for seq_id, _ in ends_early}:
        samples = {sample for sample in ends_early if sample[0] == seq_id}
        ends = {run.answers[sample].end for sample in samples}
        assert samples & run.cancelled or ends & {expected[sample].end for sample in samples}, f"request {seq_id}"
    return run


def _failed_with_siblings(answers: Answers) -> set[tuple[int, int]]:
    """Return the samples of requests that fail and have several.

    The failure of one sample ends all of its request, wherever the others are by then.
    """
    failed = {seq_id for (seq_id, _), recorded in answers.items() if isinstance(recorded.end, Reason)}
    num_samples = Counter(seq_id for seq_id, _ in answers)
    return {sample for sample in answers if sample[0] in failed and num_samples[sample[0]] > 1}


def _assert_same_logprobs(found: Sequence[SampledToken], known: Sequence[SampledToken], tolerance: float) -> None:
    for one, other in zip(found, known, strict=False):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert abs(one.logprobs.logprob - other.logprobs.logprob) <= tolerance
            values = [value for _, value in one.logprobs.top], [value for _, value in other.logprobs.top]
            assert all(abs(a - b) <= tolerance for a, b in zip(*values, strict=True))
