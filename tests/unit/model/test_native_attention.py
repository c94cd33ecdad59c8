"""Our kernels against torch."""

from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.model.attention.attention_inputs import AttentionParams, AttentionStep, CausalMasks, Segment
from baton.model.attention.paged_attention import paged_attention
from baton.model.device.kv_tensors import KvCache
from baton.model.forms.decoder_form import ACTIVATIONS
from baton.model.forms.recognise import apply_gate, apply_norm, rotate
from baton.model.kernels.cpu.kernel_library import Kernels, WeightArena, load_kernels, paged_kernel
from baton.model.kernels.layer_values import Gate, HeadNorms, RmsNorm, Rotary
from baton.model.linear.packed_linear import PackedGemm
from tests.random_kv import fill_with_random_numbers, numbers_of, poison, set_numbers, small_layout
from tests.scale import sized
from tests.unit.model.native_libraries import library_for, processors

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SEQUENCES = ((1, 1), (1, 17), (1, 900), (5, 5), (40, 790), (200, 200), (1, 33), (130, 513))
"""(tokens in the step, context length) of each sequence. KV is summed in segments of 768 tokens."""
KV_TOKENS = 2800
"""Tokens of memory for all sequences, in blocks of any size."""
SHAPES = (
    (4, 2, 64, 16),
    (8, 1, 128, 16),
    (8, 8, 32, 8),
    (4, 2, 80, 16),
    (14, 2, 64, 32),
    (4, 4, 7, 1),
    # more query heads per KV head than a tile takes, also in the next shape; then exactly as many
    (160, 1, 8, 16),
    (258, 2, 32, 16),
    (128, 1, 32, 16),
    (2, 1, 96, 16),
    (3, 1, 1024, 16),
)
"""(query heads, KV heads, head size, block size)."""
THREADS_BY_WINDOW: dict[int | None, tuple[int, ...]] = sized(
    {None: (2,), 5: (1,), 100: (5,)}, {None: (1, 2, 5), 5: (1, 2, 5), 100: (1, 2, 5)}
)


@pytest.fixture(params=processors(), ids=" ".join)
def library(request: pytest.FixtureRequest) -> Path:
    """Compile the kernels for one processor."""
    return library_for(request.param)


one_case_at_a_time = pytest.mark.parametrize("library", processors(), ids=" ".join, indirect=True)
"""Outermost mark of tests that compare all libraries with one reference, which is then computed once."""


def cache_of(heads: int, dim: int, size: int, dtype: torch.dtype, num_blocks: int, kv_dtype: str = "auto") -> KvCache:
    layout = small_layout(size=size, heads=heads, dim=dim, dtype=dtype, kv_dtype=kv_dtype)
    cache = KvCache.zeros(layout, num_blocks, dtype=dtype)
    fill_with_random_numbers(cache)
    return cache


def step_of(cache: KvCache, sequences: tuple[tuple[int, int], ...] = SEQUENCES) -> AttentionStep:
    """Return a step over scattered blocks. Slots beyond a sequence's end are NaN."""
    size = cache.block_size_tokens
    free = list(np.random.default_rng(2).permutation(cache.num_blocks))
    segments, row = [], 0
    for count, context in sequences:
        blocks = np.array([free.pop() for _ in range(-(-context // size))], dtype=np.int64)
        if context % size:
            poison(cache, int(blocks[-1]), slice(context % size, None))
        segments.append(Segment(token_begin=row, num_tokens=count, kv_begin=context - count, block_ids=blocks))
        row += count
    return AttentionStep(cache, segments, CausalMasks(cache.dtype, cache.device), paged_attention)


class Case:
    """A step with random queries, KV and sinks, and the reference's results, each computed once."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: str) -> None:
        heads, kv_heads, self.dim, size = shape
        self._step = step_of(cache_of(kv_heads, self.dim, size, dtype, KV_TOKENS // size, kv_dtype=kv_dtype))
        num_tokens, generator = self._step.segments[-1].token_begin + SEQUENCES[-1][0], torch.Generator().manual_seed(3)
        self._query = torch.randn(heads, num_tokens, self.dim, generator=generator).to(dtype)
        self._sinks = torch.randn(heads, generator=generator) * 4
        self._sinks[:2] = torch.tensor([60.0, -60.0])
        self._wide_step = float_step(self._step)
        self._right: dict[tuple[int | None, bool], torch.Tensor] = {}

    def right(self, window: int | None, *, has_sinks: bool = False) -> torch.Tensor:
        """Return the reference's result in float32, for the numbers that are stored."""
        if (window, has_sinks) not in self._right:
            self._right[window, has_sinks] = paged_attention(
                self._query.float(), 1, self._wide_step, self.dim**-0.5, window, self._sinks if has_sinks else None
            )
        return self._right[window, has_sinks]

    def assert_right(
        self, library: Path, num_threads: int, window: int | None, near: float, *, has_sinks: bool = False
    ) -> None:
        kernel, sinks = paged_kernel(Kernels(library, num_threads)), self._sinks if has_sinks else None
        got = kernel(self._query, 1, self._step, self.dim**-0.5, window, sinks)
        right = self.right(window, has_sinks=has_sinks)
        assert (got.float() - right).abs().max().item() < near, (window, num_threads)


case_of = lru_cache(maxsize=1)(Case)
"""Keeps the last case, because libraries take turns (`one_case_at_a_time`)."""


@one_case_at_a_time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_attention_equals_the_reference(
    library: Path, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    case = case_of(shape, dtype, "auto")
    for window, thread_counts in THREADS_BY_WINDOW.items():
        for num_threads in thread_counts:
            case.assert_right(library, num_threads, window, TOLERANCE[dtype] * max(1, case.dim // 256))


@one_case_at_a_time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[3:6], ids=str)
def test_native_attention_to_int8_equals_the_reference(
    library: Path, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """The reference attends to the numbers that the integers stand for, in float32."""
    for window in (None, 100):
        case_of(shape, dtype, "int8").assert_right(library, 2, window, TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("window", [None, 5, 800])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (8, 1, 128), (1, 1, 96)])
def test_bf16_attention_of_a_row_is_independent_of_other_rows(
    heads: int, kv_heads: int, dim: int, window: int | None, kv_dtype: str
) -> None:
    """Compare bit by bit, with few and many rows and tiles of all sizes, and contexts split over threads.

    Without the bfloat16 dot product, a single row is summed in another order.
    """
    if not load_kernels(1).has_bf16_dot:
        return
    cache = cache_of(kv_heads, dim, 16, torch.bfloat16, KV_TOKENS // 16, kv_dtype=kv_dtype)
    step = step_of(cache)
    num_tokens = step.segments[-1].token_begin + SEQUENCES[-1][0]
    query = torch.randn(heads, num_tokens, dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    batched = paged_kernel(load_kernels(1))(query, 1, step, dim**-0.5, window)
    assert torch.equal(paged_kernel(load_kernels(5))(query, 1, step, dim**-0.5, window), batched)
    for rows in (np.arange(0, num_tokens, 7), np.arange(3, num_tokens, 50), np.array([2])):
        for num_threads in (1, 3):
            found = attend_rows(load_kernels(num_threads), query, step, rows, AttentionParams(dim**-0.5, window))
            assert torch.equal(found, batched[rows])


def attend_rows(
    kernels: Kernels, query: torch.Tensor, step: AttentionStep, rows: np.ndarray, params: AttentionParams
) -> torch.Tensor:
    """Return the attention of some tokens of a step, each as a sequence of its own."""
    own = query.transpose(0, 1)[rows].contiguous()
    found = torch.empty_like(own)
    kernels.attend(own, found, step.cache, 1, step.tables_for_rows(rows), params)
    return found


@pytest.mark.parametrize("window", [None, 6150])
def test_segments_of_long_contexts_are_longer(library: Path, window: int | None) -> None:
    """From 6,145 visible tokens on a segment has 1,536 tokens, so the chunk is divided there."""
    cache = cache_of(1, 32, 16, torch.bfloat16, 400)
    step = step_of(cache, ((40, 6160),))
    query = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    kernels = Kernels(library, 3)
    batched = paged_kernel(kernels)(query, 1, step, 32**-0.5, window)
    right = paged_attention(query.float(), 1, float_step(step), 32**-0.5, window)
    assert (batched.float() - right).abs().max() < TOLERANCE[torch.bfloat16]
    rows = np.arange(40)
    for num_threads in (1, 3):
        found = attend_rows(Kernels(library, num_threads), query, step, rows, AttentionParams(32**-0.5, window))
        assert torch.equal(found, batched) or not kernels.has_bf16_dot
        assert (found.float() - right).abs().max() < TOLERANCE[torch.bfloat16]


def float_step(step: AttentionStep) -> AttentionStep:
    """Return the same step over the same values in float32."""
    cache = step.cache
    wide = cache_of(*cache.uniform_shape, cache.block_size_tokens, torch.float32, cache.num_blocks)
    for to, kv in zip(wide.layers, cache.layers, strict=True):
        set_numbers(to, numbers_of(kv))
    return AttentionStep(wide, step.segments, CausalMasks(torch.float32, cache.device), paged_attention)


@one_case_at_a_time
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 2, 64, 16), (160, 1, 8, 16), (4, 4, 7, 1)], ids=str)
def test_attention_with_sinks_equals_the_reference(
    library: Path, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """Some sinks are far above and some far below all scores. With two threads a long context is split."""
    case = case_of(shape, dtype, "auto")
    for window in (None, 100):
        assert (case.right(window, has_sinks=True) - case.right(window)).abs().max() > 0.1
        case.assert_right(library, 2, window, TOLERANCE[dtype], has_sinks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "size"), [(64, 16), (80, 16), (64, 4)])
def test_blocks_before_the_window_are_not_read(library: Path, dtype: torch.dtype, dim: int, size: int) -> None:
    """They belong to other sequences by now: NaN in them must change nothing, bit for bit."""
    window = 100
    cache = cache_of(2, dim, size, dtype, KV_TOKENS // size)
    step = step_of(cache)
    query = torch.randn(4, step.segments[-1].token_begin + SEQUENCES[-1][0], dim).to(dtype)
    for num_threads in (1, 2):
        attention = paged_kernel(Kernels(library, num_threads))
        before, reference = (kernel(query, 1, step, 0.125, window) for kernel in (attention, paged_attention))
        kept = cache.memory.clone()
        num_freed = free_blocks_before_window(step, window)
        after = attention(query, 1, step, 0.125, window)
        assert num_freed > 20
        assert before.isfinite().all()
        assert torch.equal(before, after)
        assert torch.equal(paged_attention(query, 1, step, 0.125, window), reference)
        cache.memory.copy_(kept)


def free_blocks_before_window(step: AttentionStep, window: int) -> int:
    """Fill all blocks wholly before the window of a sequence's first token with NaN; return how many."""
    freed = 0
    for segment in step.segments:
        first = max(0, segment.kv_begin + 1 - window) // step.cache.block_size_tokens
        for block_id in segment.block_ids[:first]:
            poison(step.cache, int(block_id))
        freed += first
    return freed


@pytest.mark.fault("F-13")
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_nan_stays_in_its_sequence(library: Path, part: int) -> None:
    cache = cache_of(2, 64, 16, torch.bfloat16, KV_TOKENS // 16)
    step = step_of(cache)
    query = torch.randn(4, step.segments[-1].token_begin + SEQUENCES[-1][0], 64).bfloat16()
    poisoned = step.segments[2]
    kv = cache.layers[1]
    (kv.keys, kv.values)[part][int(poisoned.block_ids[3]), 0, 5, 7] = float("nan")
    got = paged_kernel(Kernels(library, 1))(query, 1, step, 0.125, None).isnan().flatten(1).any(dim=1)
    ends = [segment.token_begin for segment in step.segments] + [len(got)]
    assert [bool(got[begin:end].any()) for begin, end in pairwise(ends)] == [
        segment is poisoned for segment in step.segments
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_gate_equal_torch(library: Path, dtype: torch.dtype) -> None:
    kernels = Kernels(library, 2)
    x, added = torch.randn(70, 520).to(dtype), torch.randn(70, 520).to(dtype)
    both = (x.float() + added.float()).to(dtype)
    hidden = x.clone()
    norm = RmsNorm(torch.randn(520), 1e-6)
    got = kernels.add_and_norm(hidden, added, norm)
    assert torch.equal(hidden, both)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.float(), apply_norm(both, norm), rtol=near, atol=near)
    pair = (torch.randn(70, 520) * 20).to(dtype)
    pair[3, 5] = pair[4, 300] = float("nan")
    limited = (Gate("silu", alpha=1.702, limit=7.0, up_shift=1.0), Gate("gelu", limit=3.0))
    for gate in (*map(Gate, ACTIVATIONS), *limited):
        gated = apply_gate(pair[:, :260], pair[:, 260:], gate)
        torch.testing.assert_close(kernels.gate(pair, gate).float(), gated, rtol=near, atol=1e-3, equal_nan=True)
        assert gated.isnan().sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_next", [False, True], ids=["no next norm", "a next norm"])
def test_added_values_are_normalised_and_multiplied(library: Path, dtype: torch.dtype, has_next: bool) -> None:
    kernels = Kernels(library, 2)
    x, added = torch.randn(70, 520).to(dtype), (torch.randn(70, 520) * 9).to(dtype)
    after, norm = RmsNorm(torch.randn(520), 1e-5), RmsNorm(torch.randn(520), 1e-6) if has_next else None
    right = x.float() + 0.22 * apply_norm(added, after)
    got = kernels.add_and_norm(x, added, norm, after=after, multiplier=0.22)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(x.float(), right, rtol=near, atol=near)
    expected = x.float() if norm is None else apply_norm(x, norm)
    torch.testing.assert_close(got.float(), expected, rtol=near, atol=near)
    assert (got.data_ptr() == x.data_ptr()) is not has_next


HEAD_NORMS = {
    "no norm": HeadNorms(),
    "each head": HeadNorms(q=RmsNorm(torch.rand(80) + 0.5, 1e-6), k=RmsNorm(torch.rand(80) + 0.5, 1e-3)),
    "all heads": HeadNorms(
        q=RmsNorm(torch.rand(320) + 0.5, 1e-6), k=RmsNorm(torch.rand(160) + 0.5, 1e-3), over_all_heads=True
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("half", [None, 30, 40], ids=["no rotary", "partial rotary", "whole heads"])
@pytest.mark.parametrize("norm", list(HEAD_NORMS))
def test_head_norms_and_rotary_equal_torch(library: Path, dtype: torch.dtype, half: int | None, norm: str) -> None:
    kernels, norms, cache = Kernels(library, 2), HEAD_NORMS[norm], cache_of(2, 80, 16, dtype, 3)
    qkv = torch.randn(37, 8 * 80).to(dtype)
    slots = torch.randperm(3 * 16)[:37]
    rotary = None if half is None else Rotary(torch.randn(37, half), torch.randn(37, half))
    scale = torch.rand(37) + 0.5
    expected = []
    for part, own in ((qkv[:, :320], norms.q), (qkv[:, 320:480], norms.k)):
        part = part.float() if own is None or not norms.over_all_heads else apply_norm(part, own)
        heads = part.view(37, -1, 80)
        heads = heads if own is None or norms.over_all_heads else apply_norm(heads, own)
        expected.append(rotate(heads, rotary).clone())
    value = qkv[:, 480:].view(37, 2, 80).clone()
    kernels.rope_and_store_kv(qkv, cache, 1, slots.numpy()[None], rotary, norms, scale)
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    query = qkv[:, :320].view(37, 4, 80).float()
    torch.testing.assert_close(query, expected[0] * scale[:, None, None], rtol=near, atol=near)
    kv = cache.layers[1]
    torch.testing.assert_close(kv.keys[slots // 16, :, slots % 16].float(), expected[1], rtol=near, atol=near)
    assert torch.equal(kv.values[slots // 16, :, slots % 16], value)


def test_heads_that_do_not_fit_the_cache_are_refused(library: Path) -> None:
    cache = cache_of(2, 64, 16, torch.float32, KV_TOKENS // 16)
    step = step_of(cache)
    for heads, dim in ((5, 64), (4, 32)):
        with pytest.raises(LayoutMismatch, match="2 KV heads of 64"):
            paged_kernel(Kernels(library, 1))(torch.zeros(heads, 5, dim), 1, step, 1.0, None)


@pytest.mark.parametrize(
    ("num_threads", "with_bias"), sized([(1, False), (2, True)], [*product((1, 2), (False, True))])
)
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [
        (1, 64, 64),
        (4, 1030, 70),
        (5, 2, 7),
        (6, 256, 130),
        (9, 66, 70),
        (13, 4100, 65),
        (97, 66, 200),
        (110, 4100, 130),
        (200, 2048, 64),
    ],
)
def test_gemm_equals_float64(library: Path, rows: int, k: int, n: int, with_bias: bool, num_threads: int) -> None:
    """The shapes do not fill whole panels or blocks, and some have more inputs than one slice."""
    kernels = Kernels(library, num_threads)
    torch.manual_seed(0)
    modules = [nn.Linear(k, part, bias=with_bias).bfloat16().requires_grad_(False) for part in (n - n // 3, n // 3)]
    x = torch.randn(rows, k).bfloat16()
    product = PackedGemm(kernels, *modules)
    found = product(x)
    expected = torch.cat(
        [nn.functional.linear(x.double(), m.weight.double(), m.bias.double() if with_bias else None) for m in modules],
        dim=1,
    )
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=2**-8)
    unrounded = PackedGemm(kernels, *modules, dtype=torch.float32)(x)
    torch.testing.assert_close(unrounded.double(), expected, atol=2e-4, rtol=1e-5)
    assert torch.equal(unrounded.bfloat16(), found)
    separate = torch.cat([product(row[None]) for row in x[:7]])
    assert torch.equal(found[:7], separate), "a row must not depend on the other rows"


def test_weight_arena_slices_are_aligned_and_outlive_the_arena() -> None:
    words = WeightArena(chunk_words=1024)
    taken = [words.take(count) for count in (100, 1, 900, 5, 3000, 16)]
    assert [part.numel() for part in taken] == [100, 1, 900, 5, 3000, 16]
    assert all(part.data_ptr() % 64 == 0 for part in taken)
    del words
    for number, part in enumerate(taken):
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(taken)), "no slice may overlap another"


def test_gemm_of_an_odd_number_of_bfloat16_inputs(library: Path) -> None:
    """Pairs of inputs need an even number, so the weights are packed as float32."""
    torch.manual_seed(0)
    module, x = nn.Linear(7, 8).bfloat16().requires_grad_(False), torch.randn(3, 7).bfloat16()
    found = PackedGemm(Kernels(library, 1), module, dtype=torch.float32)(x)
    expected = nn.functional.linear(x.double(), module.weight.double(), module.bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
