"""Constrained answers of the demo model equal a reference over transformers' logits and `regex`'s partial
matching, in float32."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import regex
import torch
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM

from baton.core.errors import Failure, Reason
from baton.core.kv.block_hash import chain, root_hash, token_ids
from baton.core.request import FinishReason, Sampling, TokenLogprobs
from baton.engine.constraints.grammar_tokenizer import read_grammar_tokenizer
from baton.engine.constraints.token_constraints import TokenConstraints
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.sequence import SequenceRequest, end_token_ids
from baton.engine.state.step import SampleRequest
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.torch_executor import TorchExecutor
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests.demo_vocabulary import DEMO_EOS_TOKEN_IDS, demo_text, demo_tokens
from tests.sampling_reference import reference_choice

pytestmark = pytest.mark.integration

BLOCK = 16
LOGPROB_TOLERANCE = 1e-3
PROMPTS = (tuple(range(40, 75)), tuple(range(300, 320)), (5, 6, 7))
PATTERNS = (
    (r"[a-z]{2,6}( [a-z]{2,6}){3,8}\.", rb"[a-z]{2,6}( [a-z]{2,6}){3,8}\."),
    (r"(the|a) [a-z ]{5,60}(\.|!|\?)", rb"(the|a) [a-z ]{5,60}(\.|!|\?)"),
    (r"\[(-?[1-9][0-9]{0,3}, ){2,9}0\]", rb"\[(-?[1-9][0-9]{0,3}, ){2,9}0\]"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 150, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ConstrainedAnswer:
    """One sample: its tokens with logprobs, and how it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    end: FinishReason | Failure


@cache
def loaded_demo() -> LoadedModel:
    return load_model(DEMO_DIR, dtype="float32", device="cpu")


class ConstrainedWorker:
    """Engine and executor of the demo model in float32, run step by step."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int = 16) -> None:
        loaded = loaded_demo()
        layout = loaded.layout(BLOCK)
        pool = BlockPool(num_blocks, BLOCK, MemoryGenerationTable(bytearray(ENTRY_BYTES * num_blocks), worker_epoch=1))
        config = EngineConfig(
            max_num_batched_tokens=48,
            max_num_seqs=max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size_tokens=BLOCK,
            eos_token_ids=loaded.eos_token_ids,
        )
        self.engine = Engine(config, pool, clock=lambda: 0.0)
        self.executor = TorchExecutor(
            loaded.model,
            KvCache.zeros(layout, num_blocks, "cpu"),
            thread=compute_thread(1),
            constraints=TokenConstraints(
                vocab_size=loaded.vocab_size,
                eos_token_ids=loaded.eos_token_ids,
                tokenizer=read_grammar_tokenizer(
                    DEMO_DIR, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids
                ),
            ),
        )
        self._root = root_hash(model_fingerprint=layout.model_fingerprint, block_size_tokens=BLOCK)
        self._last_id = 0

    def answer(
        self, questions: Sequence[tuple[tuple[int, ...], Sampling]], num_samples: int = 1, replayed: int = 0
    ) -> list[list[ConstrainedAnswer]]:
        """Answer all questions concurrently. The last `replayed` tokens of each prompt are outputs."""
        ids = []
        for prompt, sampling in questions:
            self._last_id += 1
            ids.append(self._last_id)
            tokens = token_ids(prompt)
            self.engine.add(
                SequenceRequest(
                    seq_id=self._last_id,
                    token_ids=tokens,
                    num_prompt_tokens=len(tokens) - replayed,
                    sampling=sampling,
                    root_hash=self._root,
                    block_hashes=tuple(chain(self._root, tokens, BLOCK)),
                    sample_indices=tuple(range(num_samples)),
                )
            )
        found: dict[tuple[int, int], list[object]] = {}
        ends: dict[tuple[int, int], FinishReason | Failure] = {}
        plan = self.engine.plan()
        while not plan.is_empty:
            after = self.engine.plan_ahead(plan)
            for output in self.engine.apply(plan, self.executor.run(plan)).outputs:
                sample = output.seq_id, output.sample_index
                found.setdefault(sample, []).extend((token.token_id, token.logprobs) for token in output.tokens)
                if end := output.finish or output.failure:
                    ends[sample] = end
            plan = self.engine.plan() if after.is_empty else after
        return [
            [
                ConstrainedAnswer(*map(tuple, zip(*found[seq_id, index], strict=True)), ends[seq_id, index])  # type: ignore[call-overload, arg-type]
                for index in range(num_samples)
            ]
            for seq_id in ids
        ]


def outcomes(answers: list[list[ConstrainedAnswer]]) -> list[list[tuple[tuple[int, ...], FinishReason | Failure]]]:
    """Return tokens and ends. Logprobs may differ in the last bits, because a batch has other sums."""
    return [[(answer.tokens, answer.end) for answer in samples] for samples in answers]


@pytest.fixture
def workers() -> Iterator[list[ConstrainedWorker]]:
    opened: list[ConstrainedWorker] = []
    yield opened
    for worker in opened:
        worker.executor.close()


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32).eval()
    return model


def open_worker(workers: list[ConstrainedWorker], **sizes: int) -> ConstrainedWorker:
    workers.append(ConstrainedWorker(**sizes))
    return workers[-1]


@cache
def continuing(pattern: bytes, text: bytes) -> frozenset[int]:
    """Return the tokens after which a text can still match."""
    compiled = regex.compile(pattern)
    return frozenset(
        token_id
        for token_id, token in enumerate(demo_tokens())
        if token is not None and compiled.fullmatch(text + token, partial=True)
    )


def allowed_by(pattern: bytes, before: Sequence[int], sampling: Sampling) -> set[int]:
    """Return what the rules allow, by definition."""
    text = demo_text(list(before))
    found = set(continuing(pattern, text))
    if regex.fullmatch(pattern, text):
        found |= set(end_token_ids(sampling, DEMO_EOS_TOKEN_IDS))
    banned = {word[-1] for word in sampling.bad_words if list(before[len(before) - len(word) + 1 :]) == list(word[:-1])}
    return found - banned


@torch.inference_mode()
def check(
    model: torch.nn.Module,
    prompt: tuple[int, ...],
    sampling: Sampling,
    pattern: bytes,
    index: int,
    got: ConstrainedAnswer,
) -> None:
    """Compare each token and logprob of an answer with one pass of the reference over prompt and answer."""
    ids = torch.tensor([[*prompt, *got.tokens[:-1]]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    for position, (token, row) in enumerate(zip(got.tokens, logits, strict=True)):
        outputs = got.tokens[:position]
        is_early = position < sampling.min_tokens
        request = SampleRequest(
            sampling=sampling,
            sample_indices=(index,),
            position=len(prompt) + position,
            history=token_ids([*prompt, *outputs]),
            num_prompt_tokens=len(prompt),
            banned_token_ids=end_token_ids(sampling, DEMO_EOS_TOKEN_IDS) if is_early else (),
        )
        allowed = allowed_by(pattern, outputs, sampling)
        assert token == reference_choice(row.numpy(), request, index, allowed), (position, demo_text(list(outputs)))
        logprobs = torch.log_softmax(row, dim=-1)
        assert got.logprobs[position].logprob == pytest.approx(float(logprobs[token]), abs=LOGPROB_TOLERANCE)
        for token_id, value in got.logprobs[position].top:
            assert value == pytest.approx(float(logprobs[token_id]), abs=LOGPROB_TOLERANCE)
    if got.end is FinishReason.STOP:
        assert regex.fullmatch(pattern, demo_text(list(got.tokens)))
    else:
        assert (got.end, len(got.tokens)) == (FinishReason.LENGTH, sampling.max_tokens)


GREEDY = Sampling(max_tokens=40, temperature=0.0, num_logprobs=3)
SEEDED = replace(GREEDY, temperature=0.9, seed=11)
VARIANTS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "truncated": replace(SEEDED, top_k=30, top_p=0.9, min_p=0.01),
    "penalties": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((300, 4.0),)),
    "seeded penalties": replace(SEEDED, frequency_penalty=0.7, repetition_penalty=1.2, top_p=0.9),
    "stops": replace(SEEDED, stop_token_ids=(1,), min_tokens=2, ignore_eos=True, max_tokens=24),
    "bad words": replace(GREEDY, bad_words=((67,), (260, 261))),
}


SAMPLINGS = pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, marks=pytest.mark.long, id="greedy"), pytest.param(SEEDED, id="seeded")]
)
OTHER_VARIANTS = {"greedy", "seeded", "seeded penalties"}
"""Those of which the others contain each rule. They run in `make test-long` only."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in OTHER_VARIANTS else name for name in VARIANTS]
)
def test_constrained_answers_equal_the_reference(
    name: str, workers: list[ConstrainedWorker], reference: torch.nn.Module
) -> None:
    questions = [
        (prompt, replace(VARIANTS[name], grammar=str(LLMatcher.grammar_from_regex(pattern))), byte_pattern)
        for prompt, (pattern, byte_pattern) in zip(PROMPTS, PATTERNS, strict=True)
    ]
    free = replace(VARIANTS[name], bad_words=())  # an unconstrained sequence in the same batch
    asked = [*((prompt, sampling) for prompt, sampling, _ in questions), (PROMPTS[0], free)]
    answers = open_worker(workers, num_blocks=60).answer(asked, num_samples=2)
    assert all(len(answer.tokens) for samples in answers for answer in samples)
    for (prompt, sampling, pattern), samples in zip(questions, answers, strict=False):
        for index, answer in enumerate(samples):
            check(reference, prompt, sampling, pattern, index, answer)
    (alone,) = open_worker(workers, num_blocks=60).answer([(PROMPTS[0], free)], num_samples=2)
    assert [answer.tokens for answer in answers[-1]] == [answer.tokens for answer in alone]


@pytest.mark.fault("F-52")
@SAMPLINGS
def test_constrained_answers_survive_preemption_and_a_retry_at_any_token(
    sampling: Sampling, workers: list[ConstrainedWorker]
) -> None:
    grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False}))
    sampling = replace(sampling, grammar=grammar, max_tokens=60)
    questions = [(PROMPTS[0][: 12 + number], replace(sampling, seed=number)) for number in range(6)]
    roomy = open_worker(workers, num_blocks=100)
    answers = roomy.answer(questions)
    small = open_worker(workers, num_blocks=9)
    assert outcomes(small.answer(questions)) == outcomes(answers)
    assert small.engine.counters.preemptions > 0
    prompt, one = questions[0]
    whole = answers[0][0].tokens
    assert len(whole) > 8
    for count in range(1, len(whole)):
        (continued,) = roomy.answer([(prompt + whole[:count], one)], replayed=count)
        assert continued[0].tokens == whole[count:]
    for (answer,) in answers:
        text = demo_text(list(answer.tokens)).decode()
        if answer.end is FinishReason.STOP:
            value = json.loads(text)
            assert re.fullmatch(r".{0,20}", value["name"], re.DOTALL)
            assert 0 <= value["age"] <= 150


THINK_END = 1
"""A special token of the demo model, which stands for the end of the reasoning."""


@SAMPLINGS
def test_samples_with_reasoning_do_not_depend_on_the_prefix_cache_or_on_preemption(
    sampling: Sampling, workers: list[ConstrainedWorker]
) -> None:
    schema = json.dumps({"enum": ["yes", "no", "perhaps"], "x-guidance": {"whitespace_flexible": False}})
    grammar = f"start: REASONING <[{THINK_END}]> %json {schema}\nREASONING: /[a-z ]{{8,30}}/"
    sampling = replace(sampling, grammar=grammar)
    questions = [((*range(40, 80), number), replace(sampling, seed=number)) for number in range(2)]
    worker = open_worker(workers, num_blocks=100)
    answers = worker.answer(questions, num_samples=4)
    for samples in answers:
        for answer in samples:
            reasoning, _, content = (demo_text(part) for part in _split(answer.tokens, THINK_END))
            assert answer.end is FinishReason.STOP
            assert re.fullmatch(rb"[a-z ]{8,30}", reasoning)
            assert json.loads(content) in ("yes", "no", "perhaps")
    assert outcomes(worker.answer(questions, num_samples=4)) == outcomes(answers)  # the prompts are cached now
    small = open_worker(workers, num_blocks=10)
    assert outcomes(small.answer(questions, num_samples=4)) == outcomes(answers)
    assert small.engine.counters.preemptions > 0
    prompt, one = questions[0]
    tokens = answers[0][0].tokens
    place = tokens.index(THINK_END)
    for count in (1, place, place + 1):
        (continued,) = worker.answer([(prompt + tokens[:count], one)], replayed=count)
        assert continued[0].tokens == tokens[count:]


def _split(tokens: tuple[int, ...], at: int) -> tuple[list[int], list[int], list[int]]:
    place = tokens.index(at)
    return list(tokens[:place]), [at], list(tokens[place + 1 :])


@pytest.mark.fault("F-56")
def test_request_without_a_token_left_fails_alone(workers: list[ConstrainedWorker]) -> None:
    ends = replace(GREEDY, grammar=str(LLMatcher.grammar_from_regex("the")), ignore_eos=True)
    worker = open_worker(workers, num_blocks=60)
    failed, free = worker.answer([(PROMPTS[0], ends), (PROMPTS[1], GREEDY)])
    assert isinstance(failed[0].end, Failure)
    assert failed[0].end.reason is Reason.NO_TOKEN_LEFT
    assert demo_text(list(failed[0].tokens)) == b"the"
    assert isinstance(free[0].end, FinishReason)
    assert outcomes([free]) == outcomes(worker.answer([(PROMPTS[1], GREEDY)]))
