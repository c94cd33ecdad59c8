"""Our kernels against torch, and how they come to be."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.model.attention import paged_attention
from baton.engine.model.attention_step import AttentionStep, CausalMasks, Segment
from baton.engine.model.kv_cache import KvCache, uniform_layout
from baton.engine.model.native.build import MAX_KEPT, NoKernels, build
from baton.engine.model.native.library import Kernels, kernel_of, load_kernels

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SEQUENCES = ((1, 1), (1, 17), (1, 700), (5, 5), (40, 300), (200, 200), (1, 33), (130, 513))
"""(tokens of the step, context) of each."""
SHAPES = ((4, 2, 64, 16), (8, 1, 128, 16), (8, 8, 32, 8), (4, 2, 80, 16), (14, 2, 64, 32))
NOTING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit 0
echo x >> "$CALLS"
sleep 0.3
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build()
    except NoKernels as error:
        pytest.skip(f"no C++ compiler: {error}")


def cache_of(heads: int, dim: int, size: int, dtype: torch.dtype, num_blocks: int) -> KvCache:
    layout = uniform_layout(
        model_fingerprint="m",
        tokenizer_fingerprint="t",
        block_size_tokens=size,
        num_layers=2,
        num_kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
    )
    cache = KvCache.zeros(layout, num_blocks)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def step_of(cache: KvCache) -> AttentionStep:
    """Scattered blocks; slots past a sequence's end are NaN."""
    size = cache.block_size_tokens
    free = list(np.random.default_rng(2).permutation(cache.num_blocks))
    segments, row = [], 0
    for count, context in SEQUENCES:
        blocks = np.array([free.pop() for _ in range(-(-context // size))], dtype=np.int64)
        if context % size:
            cache.blocks[int(blocks[-1]), :, :, :, context % size :] = float("nan")
        segments.append(Segment(token_begin=row, num_tokens=count, kv_begin=context - count, block_ids=blocks))
        row += count
    return AttentionStep(cache, segments, CausalMasks(cache.dtype, cache.device), paged_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), SHAPES)
def test_attention_is_that_of_the_reference(library: Path, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, size: int) -> None:
    cache = cache_of(kv_heads, dim, size, dtype, 2200 // size)
    step = step_of(cache)
    query = torch.randn(heads, step.segments[-1].token_begin + SEQUENCES[-1][0], dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    for window in (None, 5, 100):
        right = paged_attention(query.float(), 1, float_step(step), dim**-0.5, window)
        for num_threads in (1, 2, 5):
            got = kernel_of(Kernels(library, num_threads))(query, 1, step, dim**-0.5, window)
            assert (got.float() - right).abs().max().item() < TOLERANCE[dtype], (window, num_threads)


def float_step(step: AttentionStep) -> AttentionStep:
    """The same step over the same numbers in float32."""
    cache = step.cache
    wide = cache_of(cache.num_kv_heads, cache.head_dim, cache.block_size_tokens, torch.float32, cache.num_blocks)
    wide.blocks.copy_(cache.blocks)
    return AttentionStep(wide, step.segments, CausalMasks(torch.float32, cache.device), paged_attention)


def test_what_is_not_a_number_stays_so_and_with_its_sequence(library: Path) -> None:
    cache = cache_of(2, 64, 16, torch.bfloat16, 140)
    step = step_of(cache)
    query = torch.randn(4, step.segments[-1].token_begin + SEQUENCES[-1][0], 64).bfloat16()
    poisoned = step.segments[2]
    cache.blocks[int(poisoned.block_ids[3]), 1, 0, 0, 5, 7] = float("nan")  # one number of one key
    got = kernel_of(Kernels(library, 1))(query, 1, step, 0.125, None).isnan().flatten(1).any(dim=1)
    ends = [segment.token_begin for segment in step.segments] + [len(got)]
    assert [bool(got[begin:end].any()) for begin, end in pairwise(ends)] == [segment is poisoned for segment in step.segments]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_gate_are_those_of_torch(library: Path, dtype: torch.dtype) -> None:
    kernels = load_kernels(2)
    x, added, weight = torch.randn(70, 520).to(dtype), torch.randn(70, 520).to(dtype), torch.randn(520).to(dtype)
    both = (x.float() + added.float()).to(dtype)
    hidden = x.clone()
    got = kernels.rms_norm(hidden, added, weight, 1e-6)
    right = both.float() * torch.rsqrt(both.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    assert torch.equal(hidden, both)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.float(), right, rtol=near, atol=near)
    pair = (torch.randn(70, 520) * 20).to(dtype)
    gated = torch.nn.functional.silu(pair[:, :260].float()) * pair[:, 260:].float()
    torch.testing.assert_close(kernels.silu_gate(pair).float(), gated, rtol=near, atol=1e-3)


def test_without_a_compiler_it_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernels, match="no C\\+\\+ compiler"):
        build(tmp_path / "cache")


def test_a_compiler_that_fails_and_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "c++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(NoKernels, match="no such header"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))
    (tmp_path / "file").touch()
    with pytest.raises(NoKernels, match="cannot be written"):
        build(tmp_path / "file" / "cache")


def test_processes_that_start_together_compile_once_and_old_libraries_go(library: Path, tmp_path: Path) -> None:
    """The compiler is a script that notes each call and makes an empty library."""
    script = tmp_path / "bin" / "c++"
    script.parent.mkdir()
    script.write_text(NOTING_COMPILER)
    script.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(MAX_KEPT + 2):
        (cache / f"kernels-{number}.so").touch()
    code = f"from pathlib import Path; from baton.engine.model.native.build import build; build(Path({str(cache)!r}))"
    env = {"PATH": f"{script.parent}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    for process in [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]:
        assert process.wait(60) == 0
    assert (tmp_path / "calls").read_text() == "x\n"
    assert len(list(cache.glob("kernels-*.so"))) == MAX_KEPT
