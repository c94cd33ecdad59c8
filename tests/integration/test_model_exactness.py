"""Compares engine, block pool and a real model in one process with the teacher-forced reference."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from baton.core.kv.block_hash import chain, root_hash, token_ids
from baton.core.request import Sampling, TokenLogprobs
from baton.engine.engine import Engine, EngineConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.state.sequence import SequenceRequest
from baton.engine.state.step import StepPlan
from baton.model.backends.backend_selection import (
    CPU_BACKENDS,
    NATIVE_DECODER,
    Backend,
    CpuBackends,
    choose_backend,
)
from baton.model.device.compute_thread import compute_thread
from baton.model.device.kv_tensors import KvCache
from baton.model.loading.model_loader import LoadedModel, load_model
from baton.model.loading.model_source import DEMO_DIR
from baton.model.loading.random_init import init_model
from baton.model.torch_executor import TorchExecutor
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from tests.exactness import Answer, ExactnessChecker, NotExact
from tests.scale import sized

pytestmark = pytest.mark.integration

BLOCK = 16
CHUNK = 48
TOKENS_PER_TAIL = 2_000
NOISE = 1.05
"""Largest ratio of the root-mean-square errors of bfloat16 logprobs, Baton's to those of transformers.

Measured: 0.86 with the native decoder, and 0.97 to 1.02 where logits are rounded.
"""
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # large enough for attention to matter
}
TINY_MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_TINY, num_key_value_heads=2, head_dim=32),
    "llama-one-kv-head": lambda: LlamaConfig(**_TINY, num_key_value_heads=1),
    "llama-all-kv-heads": lambda: LlamaConfig(**_TINY, num_key_value_heads=4),
    "mistral-window": lambda: MistralConfig(**_TINY, num_key_value_heads=2, sliding_window=40),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_TINY,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BACKENDS: dict[LoadedModel, Backend] = {}
"""Backend of each loaded model. Keyed by object: two models loaded from one path are different keys."""


def loaded_for(
    path: Path,
    kernels: str,
    device: str = "cpu",
    *,
    dtype: str = "float32",
    num_threads: int = 1,
    cpu_backends: CpuBackends = CPU_BACKENDS,
) -> LoadedModel:
    loaded = load_model(path, dtype=dtype, device=device)
    BACKENDS[loaded] = choose_backend(
        loaded, kernels=kernels, num_threads=num_threads, block_size_tokens=BLOCK, cpu_backends=cpu_backends
    )
    return loaded


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.long), "auto"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Return the kernels setting: torch, and the fastest backend available. Without a compiler, both are the
    same."""
    param: str = request.param
    return param


@pytest.fixture(scope="module")
def demo(kernels: str) -> tuple[LoadedModel, ExactnessChecker]:
    return loaded_for(DEMO_DIR, kernels), ExactnessChecker(DEMO_DIR)


@pytest.fixture(scope="module", params=list(TINY_MODELS))
def tiny(
    request: pytest.FixtureRequest, kernels: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedModel, ExactnessChecker]:
    path = tmp_path_factory.mktemp(request.param) / "model"
    init_model(TINY_MODELS[request.param](), path, seed=1)
    return loaded_for(path, kernels), ExactnessChecker(path)


@dataclass(frozen=True)
class Question:
    """One prompt with its sampling parameters and number of samples."""

    prompt: tuple[int, ...]
    sampling: Sampling
    num_samples: int = 1


class Worker:
    """Engine and executor over one KV memory, stepped by the test.

    `before_step` of `answer` may inspect or corrupt what the next step uses.
    """

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, max_num_seqs: int = 32, chunk: int = CHUNK) -> None:
        self.layout = loaded.layout(BLOCK)
        self.cache = KvCache.zeros(self.layout, num_blocks, loaded.device, loaded.dtype)
        pool = BlockPool(num_blocks, BLOCK, MemoryGenerationTable(bytearray(ENTRY_BYTES * num_blocks), worker_epoch=1))
        config = EngineConfig(
            max_num_batched_tokens=chunk,
            max_num_seqs=max_num_seqs,
            max_model_len=loaded.max_model_len,
            block_size_tokens=BLOCK,
            eos_token_ids=loaded.eos_token_ids,
        )
        self.engine = Engine(config, pool, clock=lambda: 0.0)
        self.executor = TorchExecutor(loaded.model, self.cache, thread=compute_thread(1), backend=BACKENDS.get(loaded))
        self.executor.warm(max_num_seqs)
        self.cache.fill_with_nan()  # reading a slot that was never written spoils the answer
        self._root = root_hash(model_fingerprint=self.layout.model_fingerprint, block_size_tokens=BLOCK)
        self._next_id = 0

    def answer(
        self, questions: Sequence[Question], before_step: Callable[[StepPlan], None] | None = None
    ) -> list[Answer]:
        """Answer all questions concurrently; return one answer per sample, in order."""
        question_of = {}
        for question in questions:
            self._next_id += 1
            question_of[self._next_id] = question
            self.engine.add(self._request(self._next_id, question))
        tokens_of: dict[tuple[int, int], list[tuple[int, TokenLogprobs]]] = {}
        plan = self.engine.plan()
        while not plan.is_empty:
            if before_step is not None:
                before_step(plan)
            after = self.engine.plan_ahead(plan)  # as the engine loop does when all sequences only decode
            for output in self.engine.apply(plan, self.executor.run(plan)).outputs:
                assert output.failure is None, output.failure
                tokens = tokens_of.setdefault((output.seq_id, output.sample_index), [])
                assert output.output_index == len(tokens)
                for token in output.tokens:
                    assert token.logprobs is not None
                    tokens.append((token.token_id, token.logprobs))
            self.engine.check()
            plan = self.engine.plan() if after.is_empty else after
        return [
            Answer(
                prompt=question.prompt,
                sampling=question.sampling,
                tokens=tuple(token for token, _ in tokens_of[seq_id, sample_index]),
                logprobs=tuple(logprobs for _, logprobs in tokens_of[seq_id, sample_index]),
                sample_index=sample_index,
            )
            for seq_id, question in question_of.items()
            for sample_index in range(question.num_samples)
        ]

    def _request(self, seq_id: int, question: Question) -> SequenceRequest:
        ids = token_ids(question.prompt)
        return SequenceRequest(
            seq_id=seq_id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            sampling=question.sampling,
            root_hash=self._root,
            block_hashes=tuple(chain(self._root, ids, BLOCK)),
            sample_indices=tuple(range(question.num_samples)),
        )


@contextmanager
def worker_of(loaded: LoadedModel, **sizes: int) -> Iterator[Worker]:
    """Provide a worker; check afterwards that no block is leaked."""
    worker = Worker(loaded, **sizes)
    try:
        yield worker
        counts = worker.engine.pool.counts()
        assert counts.free + counts.cached == counts.total
    finally:
        worker.executor.close()


def random_sampling(rng: Random, max_tokens: int) -> Sampling:
    """Return greedy parameters half of the time, otherwise any that a client can request."""
    fields: dict[str, object] = {
        "max_tokens": max_tokens,
        "num_logprobs": 5,
        "seed": rng.getrandbits(63),
        "temperature": 0.0,
    }
    if rng.random() < 0.5:
        fields["temperature"] = rng.choice((0.3, 0.7, 1.0, 1.5))
        fields |= rng.choice(
            ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.95, "min_p": 0.01})
        )
    if rng.random() < 0.3:
        fields |= rng.choice(
            (
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.5, "frequency_penalty": 0.2},
                {"min_tokens": 3},
                {"ignore_eos": True},
                {"logit_bias": ((7, 2.0), (11, -100.0))},
            )
        )
    return Sampling(**fields)  # type: ignore[arg-type]


def random_prompts(rng: Random, count: int, vocab_size: int, longest: int) -> list[tuple[int, ...]]:
    """Return prompts with lengths around block and chunk boundaries, up to `longest`.

    Some share a prefix, and some are repeated.
    """
    boundaries = [
        edge + off
        for edge in (BLOCK, 2 * BLOCK, CHUNK, 2 * CHUNK, 4 * CHUNK)
        for off in (-1, 0, 1)
        if edge + off <= longest
    ]
    prompts: list[tuple[int, ...]] = []
    for number in range(count):
        length = rng.choice(boundaries) if number % 2 else rng.randint(1, longest)
        prompt = tuple(rng.choices(range(vocab_size), k=length))
        if prompts and rng.random() < 0.4:
            shared = rng.choice(prompts)
            prompt = (shared[: rng.randint(0, len(shared))] + prompt)[:longest]
        if prompts and rng.random() < 0.1:
            prompt = rng.choice(prompts)
        prompts.append(prompt)
    return prompts


def random_questions(
    seed: int, loaded: LoadedModel, count: int, *, longest: int, max_tokens: int, num_samples: int = 1
) -> list[Question]:
    """Return random questions for the model."""
    rng = Random(seed)
    return [
        Question(prompt, random_sampling(rng, rng.randint(1, max_tokens)), num_samples)
        for prompt in random_prompts(rng, count, loaded.vocab_size, longest)
    ]


def blocks_for(questions: Sequence[Question], spare: int) -> int:
    """Return the number of blocks that the largest question needs alone, plus `spare`."""
    return max((len(q.prompt) + q.sampling.max_tokens + BLOCK) // BLOCK for q in questions) + spare


def test_demo_model_is_exact(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = demo
    questions = random_questions(1, loaded, sized(14, 150), longest=sized(260, 3000), max_tokens=sized(12, 40))
    with worker_of(loaded, num_blocks=sized(200, 3000), chunk=sized(CHUNK, 512)) as worker:
        exactness = checker.check(worker.answer(questions))
    assert exactness.num_tokens >= sized(50, 1500)


def test_bfloat16_differs_from_transformers_only_at_near_ties(kernels: str) -> None:
    """Greedy decoding with cached prefixes and preempted sequences.

    At a near-tie, the two float32 logits differ by less than transformers' bfloat16 logits are off at p99. Of
    2,000 tokens, one may be at a tie twice as wide. Backends that round their logits may be off by one more
    step of bfloat16.

    Logprobs are as close to float32 as those of transformers in bfloat16. The native decoder, which does not
    round its logits, is compared with transformers before that rounding.
    """
    loaded = loaded_for(DEMO_DIR, kernels, dtype="bfloat16", num_threads=2)
    rounds = BACKENDS[loaded].name != "native decoder"
    sampling = Sampling(max_tokens=40, temperature=0.0, num_logprobs=1, ignore_eos=True)
    prompts = random_prompts(Random(0), sized(25, 300), loaded.vocab_size, 200)
    with worker_of(loaded, num_blocks=60) as worker:
        answers = worker.answer([Question(prompt, sampling) for prompt in prompts])
        assert worker.engine.counters.preemptions > 0
        assert worker.engine.counters.cached_tokens > 0
    exact, half = (
        AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    )
    errors, margins, own_errors, their_errors = [], [], [], []
    for answer in answers:
        ids, first = torch.tensor([answer.prompt + answer.tokens[:-1]]), len(answer.prompt) - 1
        tokens = torch.tensor(answer.tokens)
        with torch.inference_mode():
            right, rounded = (
                model(input_ids=ids, use_cache=False).logits[0, first:].float() for model in (exact, half)
            )
            hidden = half.model(input_ids=ids, use_cache=False).last_hidden_state[0, first:]
            theirs = rounded if rounds else hidden.float() @ half.lm_head.weight.float().T
        errors.append((rounded - right).abs().flatten())
        step = torch.finfo(torch.bfloat16).eps * right.amax(-1).abs() if rounds else 0.0
        margins.append((right.amax(-1) - of_tokens(right, tokens) - step)[right.argmax(-1) != tokens])
        right_logprobs = of_tokens(right.log_softmax(-1), tokens)
        own_errors.append(torch.tensor([each.logprob for each in answer.logprobs]) - right_logprobs)
        their_errors.append(of_tokens(theirs.log_softmax(-1), tokens) - right_logprobs)
    differing, near = torch.cat(margins), float(np.quantile(torch.cat(errors).numpy(), 0.99))
    num_tokens = len(torch.cat(own_errors))
    assert len(differing) < 0.05 * num_tokens
    assert int((differing > near).sum()) <= num_tokens // TOKENS_PER_TAIL
    assert (differing < 2 * near).all()
    assert torch.cat(own_errors).square().mean() < NOISE**2 * torch.cat(their_errors).square().mean()


def of_tokens(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each row's value of its token. Shapes: rows [tokens, vocabulary], tokens [tokens]."""
    return rows.gather(-1, tokens[:, None])[:, 0]


def test_bfloat16_answers_do_not_depend_on_batch_or_preemption(tmp_path: Path) -> None:
    """The native decoder gives bit-identical logprobs, because no row's sums depend on other rows.

    The model has four queries per key, and contexts too short to be split between threads. With one or two
    queries per key and without the bfloat16 dot product, a single token is summed in another order
    (`DECODE_MAX_ROWS`). Answers may then differ at near-ties.
    """
    path = tmp_path / "model"
    init_model(Qwen3Config(**_TINY, num_key_value_heads=1, head_dim=32), path, seed=1)
    native = replace(NATIVE_DECODER, serves=lambda loaded, form, kernels: True)  # even if oneDNN's GEMM is faster
    backends = CpuBackends(fastest_first=(native,))
    loaded = loaded_for(path, "auto", dtype="bfloat16", num_threads=2, cpu_backends=backends)
    assert BACKENDS[loaded].name == "native decoder"
    questions = [
        Question(q.prompt, replace(q.sampling, max_tokens=40, ignore_eos=True), 1 + i % 3)
        for i, q in enumerate(random_questions(8, loaded, sized(10, 100), longest=200, max_tokens=40))
    ]
    with worker_of(loaded, num_blocks=60) as worker:
        separate = [answer for question in questions for answer in worker.answer([question])]
    with worker_of(loaded, num_blocks=sized(600, 3000)) as worker:
        batched = worker.answer(questions)
        assert worker.engine.counters.preemptions == 0
    with worker_of(loaded, num_blocks=blocks_for(questions, 12)) as worker:
        recomputed = worker.answer(questions)
        assert worker.engine.counters.preemptions > 0
    assert batched == separate
    assert recomputed == separate


def test_tiny_architectures_are_exact(tiny: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = tiny
    questions = random_questions(2, loaded, sized(12, 60), longest=sized(200, 600), max_tokens=sized(16, 40))
    with worker_of(loaded, num_blocks=sized(150, 600)) as worker:
        checker.check(worker.answer(questions))


def test_preempted_sequences_are_exact(tiny: tuple[LoadedModel, ExactnessChecker]) -> None:
    """There are too few blocks for all, so sequences are preempted during decoding and computed again."""
    loaded, checker = tiny
    questions = [
        Question(q.prompt, replace(q.sampling, max_tokens=40, ignore_eos=True))
        for q in random_questions(3, loaded, sized(8, 60), longest=100, max_tokens=40)
    ]
    with worker_of(loaded, num_blocks=blocks_for(questions, 6)) as worker:
        checker.check(worker.answer(questions))
        assert worker.engine.counters.preemptions > 0


def test_cached_prefixes_are_exact(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """The same prompts are asked again, unchanged and longer. Some have only the last token left to
    compute."""
    loaded, checker = demo
    first = random_questions(4, loaded, sized(5, 60), longest=sized(120, 600), max_tokens=6)
    recomputed = [Question(q.prompt + (3,) * (i % 3), q.sampling) for i, q in enumerate(first)]
    whole = Question(tuple(range(4 * BLOCK)), Sampling(max_tokens=4, temperature=0.0, num_logprobs=5))
    with worker_of(loaded, num_blocks=sized(200, 3000)) as worker:
        answers = worker.answer([*first, whole])
        assert len(whole.prompt) % BLOCK == 0
        cached_before = worker.engine.counters.cached_tokens
        answers += worker.answer([*recomputed, whole])
        checker.check(answers)
        assert worker.engine.counters.cached_tokens - cached_before >= 3 * BLOCK


def test_several_samples_per_request_are_exact(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """With n > 1, full blocks are shared and the tail block is copied. The samples differ."""
    loaded, checker = demo
    questions = [
        Question(q.prompt, Sampling(max_tokens=10, seed=i, num_logprobs=5, ignore_eos=True), 3)
        for i, q in enumerate(random_questions(5, loaded, sized(4, 60), longest=120, max_tokens=8))
    ]
    with worker_of(loaded, num_blocks=sized(80, 600)) as worker:
        answers = worker.answer(questions)
        checker.check(answers)
        assert worker.engine.counters.block_copies > 0
    assert len({a.tokens for a in answers}) > len(questions)


def test_batch_does_not_change_the_answer(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """Each answer is exact, so alone and batched answers are equal up to near-ties; here there are none."""
    loaded, checker = demo
    questions = random_questions(6, loaded, 6, longest=100, max_tokens=10)
    with worker_of(loaded, num_blocks=200) as separate:
        one_by_one = [separate.answer([q])[0] for q in questions]
    with worker_of(loaded, num_blocks=200) as batched:
        answers = batched.answer(questions)
    checker.check([*one_by_one, *answers])
    assert [a.tokens for a in one_by_one] == [a.tokens for a in answers]


@pytest.mark.parametrize("corruption", ["another_block", "one_head_of_one_layer"])
def test_checker_finds_a_wrong_kv_block(tiny: tuple[LoadedModel, ExactnessChecker], corruption: str) -> None:
    """One block of a sequence gets wrong KV when decoding starts. The checker must find it."""
    loaded, checker = tiny
    prompt = tuple(Random(7).choices(range(loaded.vocab_size), k=40))
    question = Question(prompt, Sampling(max_tokens=8, temperature=0.0, num_logprobs=5, ignore_eos=True))
    with worker_of(loaded, num_blocks=16) as worker:
        corrupted: list[int] = []

        def before_step(plan: StepPlan) -> None:
            if not corrupted and plan.sequences[0].kv_begin >= len(prompt):
                first, second = plan.sequences[0].block_table[:2]
                corrupted.append(second)
                if corruption == "another_block":
                    worker.cache.copy_blocks([(first, second)])
                else:
                    values = worker.cache.layers[1].values
                    values[second, 0] = values[first, 0]

        answers = worker.answer([question], before_step)
        assert corrupted
        with pytest.raises(NotExact):
            checker.check(answers)
    with worker_of(loaded, num_blocks=16) as worker:
        checker.check(worker.answer([question]))


def test_checker_finds_a_wrong_token(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = demo
    with worker_of(loaded, num_blocks=32) as worker:
        (answer,) = worker.answer(
            [Question((5, 6, 7), Sampling(max_tokens=4, num_logprobs=5, seed=3, ignore_eos=True))]
        )
    checker.check([answer])
    wrong = Answer(prompt=answer.prompt, sampling=answer.sampling, tokens=(answer.tokens[0] ^ 1, *answer.tokens[1:]))
    with pytest.raises(NotExact, match="output 0"):
        checker.check([wrong])
