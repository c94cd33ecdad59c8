"""Engine, block pool and a real model in one process against the teacher-forced reference (acceptance 3 of
the spine)."""

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
from baton.model.backends import backend_selection
from baton.model.backends.backend_selection import Backend, choose_backend
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
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # wide enough for attention to matter
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
"""How each is run. Two that were loaded from one path are two: torch's modules are only equal to
themselves."""


def loaded_for(
    path: Path, kernels: str, device: str = "cpu", *, dtype: str = "float32", num_threads: int = 1
) -> LoadedModel:
    loaded = load_model(path, dtype=dtype, device=device)
    BACKENDS[loaded] = choose_backend(loaded, kernels=kernels, num_threads=num_threads, block_size_tokens=BLOCK)
    return loaded


@pytest.fixture(scope="module", params=["torch", "auto"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Both ways to run a model: torch's, and the fastest that is here. Where there is no compiler both are
    one."""
    chosen: str = request.param
    return chosen


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
class AttentionParams:
    prompt: tuple[int, ...]
    sampling: Sampling
    num_samples: int = 1


class Worker:
    """Engine and executor on one KV memory, stepped by hand. `before_step` may look at, or spoil, what the
    next step will use."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, max_num_seqs: int = 32, chunk: int = CHUNK) -> None:
        self.layout = loaded.layout(BLOCK)
        self.cache = KvCache.zeros(self.layout, num_blocks, loaded.device)
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
        self.cache.blocks.fill_(float("nan"))  # whoever reads what nobody has written spoils an answer
        self._root = root_hash(model_fingerprint=self.layout.model_fingerprint, block_size_tokens=BLOCK)
        self._next_id = 0

    def answer(
        self, asked: Sequence[AttentionParams], before_step: Callable[[StepPlan], None] | None = None
    ) -> list[Answer]:
        """All at once, one answer a sample, in order."""
        of_id = {}
        for one in asked:
            self._next_id += 1
            of_id[self._next_id] = one
            self.engine.add(self._request(self._next_id, one))
        got: dict[tuple[int, int], list[tuple[int, TokenLogprobs]]] = {}
        plan = self.engine.plan()
        while not plan.is_empty:
            if before_step is not None:
                before_step(plan)
            after = self.engine.plan_ahead(plan)  # as the engine's loop does, whenever answers merely go on
            for output in self.engine.apply(plan, self.executor.run(plan)).outputs:
                assert output.failure is None, output.failure
                tokens = got.setdefault((output.seq_id, output.sample_index), [])
                assert output.output_index == len(tokens)
                for token in output.tokens:
                    assert token.logprobs is not None
                    tokens.append((token.token_id, token.logprobs))
            self.engine.check()
            plan = self.engine.plan() if after.is_empty else after
        return [
            Answer(
                prompt=one.prompt,
                sampling=one.sampling,
                tokens=tuple(token for token, _ in got[seq_id, sample_index]),
                logprobs=tuple(logprobs for _, logprobs in got[seq_id, sample_index]),
                sample_index=sample_index,
            )
            for seq_id, one in of_id.items()
            for sample_index in range(one.num_samples)
        ]

    def _request(self, seq_id: int, one: AttentionParams) -> SequenceRequest:
        ids = token_ids(one.prompt)
        return SequenceRequest(
            seq_id=seq_id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            sampling=one.sampling,
            root_hash=self._root,
            block_hashes=tuple(chain(self._root, ids, BLOCK)),
            sample_indices=tuple(range(one.num_samples)),
        )


@contextmanager
def worker_of(loaded: LoadedModel, **sizes: int) -> Iterator[Worker]:
    worker = Worker(loaded, **sizes)
    try:
        yield worker
        counts = worker.engine.pool.counts()
        assert counts.free + counts.cached == counts.total
    finally:
        worker.executor.close()


def random_sampling(rng: Random, max_tokens: int) -> Sampling:
    """Greedy half of the time; otherwise any of what a client can ask for."""
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
    """Lengths around every block and chunk boundary up to `longest`, some prompts sharing a prefix, some
    repeated whole."""
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


def asked(
    seed: int, loaded: LoadedModel, count: int, *, longest: int, max_tokens: int, num_samples: int = 1
) -> list[AttentionParams]:
    rng = Random(seed)
    return [
        AttentionParams(prompt, random_sampling(rng, rng.randint(1, max_tokens)), num_samples)
        for prompt in random_prompts(rng, count, loaded.vocab_size, longest)
    ]


def blocks_for(questions: Sequence[AttentionParams], spare: int) -> int:
    """Blocks that the largest of them needs alone, and some."""
    return max((len(q.prompt) + q.sampling.max_tokens + BLOCK) // BLOCK for q in questions) + spare


def test_demo(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = demo
    questions = asked(1, loaded, sized(14, 300), longest=sized(260, 3000), max_tokens=sized(12, 40))
    with worker_of(loaded, num_blocks=sized(200, 3000), chunk=sized(CHUNK, 512)) as worker:
        found = checker.check(worker.answer(questions))
    assert found.num_tokens >= sized(50, 3000)


def test_bfloat16_differs_from_transformers_only_where_two_tokens_are_as_good(kernels: str) -> None:
    """Greedy, with cached prefixes and sequences that lose their blocks. As good: closer, before transformers
    rounds its logits, than its own bfloat16 is to float32 at p99, which ours is as close to
    (`test_decoder_backends.py`); of 2,000 tokens one may be up to twice as far, since both sides err. Ways that round
    their logits, too, may be off by one step of bfloat16 more."""
    loaded = loaded_for(DEMO_DIR, kernels, dtype="bfloat16", num_threads=2)
    sampling = Sampling(max_tokens=40, temperature=0.0, num_logprobs=1, ignore_eos=True)
    prompts = random_prompts(Random(0), sized(25, 300), loaded.vocab_size, 200)
    with worker_of(loaded, num_blocks=60) as worker:
        answers = worker.answer([AttentionParams(prompt, sampling) for prompt in prompts])
        assert worker.engine.counters.preemptions > 0
        assert worker.engine.counters.cached_tokens > 0
    exact, theirs = (
        AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
    )
    errors, margins, num_tokens = [], [], 0
    for answer in answers:
        ids, first = torch.tensor([answer.prompt + answer.tokens[:-1]]), len(answer.prompt) - 1
        with torch.inference_mode():
            right, rounded = (
                model(input_ids=ids, use_cache=False).logits[0, first:].float() for model in (exact, theirs)
            )
            hidden = theirs.model(input_ids=ids, use_cache=False).last_hidden_state[0, first:]
            logits = hidden.float() @ theirs.lm_head.weight.float().T
        errors.append((rounded - right).abs().flatten())
        best, second = logits.topk(2).values.unbind(-1)
        step = 0.0 if BACKENDS[loaded].name == "native decoder" else torch.finfo(torch.bfloat16).eps * best.abs()
        margins.append((best - second - step)[logits.argmax(-1) != torch.tensor(answer.tokens)])
        num_tokens += len(answer.tokens)
    differing, near = torch.cat(margins), float(np.quantile(torch.cat(errors).numpy(), 0.99))
    assert len(differing) < 0.05 * num_tokens
    assert int((differing > near).sum()) <= num_tokens // TOKENS_PER_TAIL
    assert (differing < 2 * near).all()


def test_bfloat16_is_the_same_alone_among_others_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of our decoder, to the last bit of a logprob: no row's sums depend on the rows beside it. Of a model
    with four queries a key, and contexts that threads do not share out: with one or two, a processor without
    pairs adds up otherwise for a token that comes alone (`FEW_ROWS`), so that an answer may part from itself,
    in batches as when computed again, where two tokens are as good."""
    path = tmp_path / "model"
    init_model(Qwen3Config(**_TINY, num_key_value_heads=1, head_dim=32), path, seed=1)
    monkeypatch.setattr(
        backend_selection, "can_decode", lambda model, kernels: True
    )  # also where oneDNN's products are faster
    loaded = loaded_for(path, "auto", dtype="bfloat16", num_threads=2)
    assert BACKENDS[loaded].name == "native decoder"
    questions = [
        AttentionParams(q.prompt, replace(q.sampling, max_tokens=40, ignore_eos=True), 1 + i % 3)
        for i, q in enumerate(asked(8, loaded, sized(20, 100), longest=200, max_tokens=40))
    ]
    with worker_of(loaded, num_blocks=60) as worker:
        alone = [answer for question in questions for answer in worker.answer([question])]
    with worker_of(loaded, num_blocks=sized(600, 3000)) as worker:
        together = worker.answer(questions)
        assert worker.engine.counters.preemptions == 0
    with worker_of(loaded, num_blocks=blocks_for(questions, 12)) as worker:
        again = worker.answer(questions)
        assert worker.engine.counters.preemptions > 0
    assert together == alone
    assert again == alone


def test_tiny_architectures(tiny: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = tiny
    questions = asked(2, loaded, sized(12, 60), longest=sized(200, 600), max_tokens=sized(16, 40))
    with worker_of(loaded, num_blocks=sized(150, 600)) as worker:
        checker.check(worker.answer(questions))


def test_preempted(tiny: tuple[LoadedModel, ExactnessChecker]) -> None:
    """Too few blocks for all: sequences lose theirs in mid-answer and compute them again."""
    loaded, checker = tiny
    questions = [
        AttentionParams(q.prompt, replace(q.sampling, max_tokens=40, ignore_eos=True))
        for q in asked(3, loaded, sized(8, 60), longest=100, max_tokens=40)
    ]
    with worker_of(loaded, num_blocks=blocks_for(questions, 6)) as worker:
        checker.check(worker.answer(questions))
        assert worker.engine.counters.preemptions > 0


def test_prefix_hits(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """The same prompts again, whole and longer: cached blocks answer, also where nothing but the last token
    is left to compute."""
    loaded, checker = demo
    first = asked(4, loaded, sized(5, 60), longest=sized(120, 600), max_tokens=6)
    again = [AttentionParams(q.prompt + (3,) * (i % 3), q.sampling) for i, q in enumerate(first)]
    whole = AttentionParams(tuple(range(4 * BLOCK)), Sampling(max_tokens=4, temperature=0.0, num_logprobs=5))
    with worker_of(loaded, num_blocks=sized(200, 3000)) as worker:
        answers = worker.answer([*first, whole])
        assert len(whole.prompt) % BLOCK == 0
        cached_before = worker.engine.counters.cached_tokens
        answers += worker.answer([*again, whole])
        checker.check(answers)
        assert worker.engine.counters.cached_tokens - cached_before >= 3 * BLOCK


def test_several_samples(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """n > 1: full blocks are shared, the tail block is copied; the samples differ."""
    loaded, checker = demo
    questions = [
        AttentionParams(q.prompt, Sampling(max_tokens=10, seed=i, num_logprobs=5, ignore_eos=True), 3)
        for i, q in enumerate(asked(5, loaded, sized(4, 60), longest=120, max_tokens=8))
    ]
    with worker_of(loaded, num_blocks=sized(80, 600)) as worker:
        answers = worker.answer(questions)
        checker.check(answers)
        assert worker.engine.counters.block_copies > 0
    assert len({a.tokens for a in answers}) > len(questions)


def test_batch_does_not_change_the_answer(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    """The same question alone and among others: each exact by itself, so equal up to near-ties; here
    equal."""
    loaded, checker = demo
    questions = asked(6, loaded, 6, longest=100, max_tokens=10)
    with worker_of(loaded, num_blocks=200) as alone:
        apart = [alone.answer([q])[0] for q in questions]
    with worker_of(loaded, num_blocks=200) as together:
        answers = together.answer(questions)
    checker.check([*apart, *answers])
    assert [a.tokens for a in apart] == [a.tokens for a in answers]


@pytest.mark.parametrize("spoil", ["another_block", "one_head_of_one_layer"])
def test_a_wrong_block_is_found(tiny: tuple[LoadedModel, ExactnessChecker], spoil: str) -> None:
    """One block of one sequence has the wrong KV when decoding starts: the checker must say so, or it proves
    nothing."""
    loaded, checker = tiny
    prompt = tuple(Random(7).choices(range(loaded.vocab_size), k=40))
    question = AttentionParams(prompt, Sampling(max_tokens=8, temperature=0.0, num_logprobs=5, ignore_eos=True))
    with worker_of(loaded, num_blocks=16) as worker:
        spoilt: list[int] = []

        def before_step(plan: StepPlan) -> None:
            if not spoilt and plan.sequences[0].kv_begin >= len(prompt):
                first, second = plan.sequences[0].block_table[:2]
                spoilt.append(second)
                kv = worker.cache.blocks
                if spoil == "another_block":
                    kv[second] = kv[first]
                else:
                    kv[second, 1, 1, 0] = kv[first, 1, 1, 0]

        answers = worker.answer([question], before_step)
        assert spoilt
        with pytest.raises(NotExact):
            checker.check(answers)
    with worker_of(loaded, num_blocks=16) as worker:
        checker.check(worker.answer([question]))


def test_a_wrong_token_is_found(demo: tuple[LoadedModel, ExactnessChecker]) -> None:
    loaded, checker = demo
    with worker_of(loaded, num_blocks=32) as worker:
        (answer,) = worker.answer(
            [AttentionParams((5, 6, 7), Sampling(max_tokens=4, num_logprobs=5, seed=3, ignore_eos=True))]
        )
    checker.check([answer])
    wrong = Answer(prompt=answer.prompt, sampling=answer.sampling, tokens=(answer.tokens[0] ^ 1, *answer.tokens[1:]))
    with pytest.raises(NotExact, match="output 0"):
        checker.check([wrong])
