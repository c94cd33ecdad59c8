"""Our kernels against torch, and how they come to be."""

import ctypes
import platform
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baton.core.errors import LayoutMismatch
from baton.engine.model.attention import paged_attention
from baton.engine.model.attention_step import Asked, AttentionStep, CausalMasks, Segment
from baton.engine.model.kv_cache import KvCache, uniform_layout
from baton.engine.model.native.build import COMPILERS, HERE, MAX_KEPT, NATIVE, OPTIONS, SOURCES, NoKernels, build
from baton.engine.model.native.decoder import Product
from baton.engine.model.native.library import Kernels, Words, kernel_of, load_kernels

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SEQUENCES = ((1, 1), (1, 17), (1, 700), (5, 5), (40, 300), (200, 200), (1, 33), (130, 513))
"""(tokens of the step, context) of each."""
SHAPES = (
    (4, 2, 64, 16),
    (8, 1, 128, 16),
    (8, 8, 32, 8),
    (4, 2, 80, 16),
    (14, 2, 64, 32),
    (4, 4, 7, 1),
    (160, 1, 8, 16),  # more query heads of a KV head than a tile takes, as in the next one; then just as many
    (258, 2, 32, 16),
    (128, 1, 32, 16),
    (2, 1, 96, 16),
    (3, 1, 1024, 16),
)
"""(query heads, KV heads, head size, block size)."""
LEAST, AVX2 = "-march=x86-64", "-march=x86-64-v3"
FOREIGN = ("-march=skylake-avx512", "-march=cooperlake") if platform.machine() == "x86_64" else (NATIVE,)
"""With AVX-512 in floats, and with its pairs of bfloat16."""
HALVES = """
#include "numbers.h"
extern "C" void widen(const baton::Fp16* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = baton::to_float(from[i]);
}
extern "C" void narrow(const float* from, baton::Fp16* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = baton::from_float<baton::Fp16>(from[i]);
}
"""
EXP2 = """
#include <cmath>
#include "numbers.h"
int main() {
    using baton::exp2_near;
    for (float x = -126.0f; x <= 127.0f; x += 0.01f)
        if (!(std::abs(exp2_near(x) / std::exp2(double(x)) - 1.0) < 3e-7)) return 1;
    if (exp2_near(-1e30f) != std::exp2(-126.0f) || exp2_near(INFINITY) != std::exp2(127.0f)) return 2;
    return std::isnan(exp2_near(NAN)) ? 0 : 3;
}
"""
EXP2_OF_PAIRS = """
#include <cmath>
#include "pair_products.h"
int main() {
#ifdef BATON_PAIRS
    using namespace baton;
    alignas(64) float found[LANES];
    for (float x = -126.0f; x <= 0.0f; x += 0.01f) {
        _mm512_store_ps(found, exp2_lanes(_mm512_set1_ps(x)));
        if (!(std::abs(found[3] / std::exp2(double(x)) - 1.0) < 3e-6)) return 1;
    }
    for (float x : {0.0f, -1.0f, -20.0f, NEVER, NAN}) {
        _mm512_store_ps(found, exp2_lanes(_mm512_set1_ps(x)));
        if (found[5] != std::exp2(x) && x == x) return 2;
        if (std::isnan(found[5]) != std::isnan(x)) return 3;
    }
#endif
    return 0;
}
"""
TRAPS = ("-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error")
"""What C++ leaves undefined ends the program."""
TEAM = """
#include <numeric>
#include <thread>
#include <vector>

#include "team.h"

using namespace baton;

// How many of the items of three loops were done while the other member of the team never came; then that one goes through them, too.
extern "C" int64_t without_the_other(int64_t count) {
    std::vector<Loop> loops(3);
    Member here(loops.data(), 2), away(loops.data(), 2);
    int64_t done = 0;
    for (int loop = 0; loop < 3; loop++) here.each(count, [&](int64_t) { done++; });
    for (int loop = 0; loop < 3; loop++) away.each(count, [&](int64_t) { done += 1'000'000; });
    return done;
}

// Each loop adds up what the one before has written, in loops of `count` items by so many threads. Its last sum: all terms are equal.
extern "C" int64_t one_after_another(int32_t threads, int64_t count, int32_t num_loops) {
    std::vector<int64_t> from(size_t(count), 1), to(size_t(count), 0);
    by_team(threads, 2 * num_loops, [&](Member& member) {
        for (int loop = 0; loop < num_loops; loop++) {
            member.each(count, [&](int64_t i) { to[size_t(i)] += std::accumulate(from.begin(), from.end(), int64_t(0)) % 1009; });
            member.each_short(count, [&](int64_t i) { from[size_t(i)] = to[size_t(i)]; });
        }
    });
    for (int64_t value : from) if (value != from[0]) return -1;
    return from[0];
}
"""
NOTING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit 0
echo x >> "$CALLS"
sleep 0.3
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def compiler() -> str:
    return next(found for name in COMPILERS if (found := shutil.which(name)))


def processors() -> list[str]:
    """This one, the least of its kind, whose vectors are as short as ARM's, and one between."""
    if platform.machine() != "x86_64":
        return [NATIVE]
    return [NATIVE, LEAST, *([AVX2] if "avx512f" in Path("/proc/cpuinfo").read_text() else [])]


@pytest.fixture(scope="module", params=processors())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a processor. All but this one's have names of their own: what is inline is one for a whole process."""
    if request.param == NATIVE:
        return build()
    path = tmp_path_factory.mktemp("library") / "kernels.so"
    options = [{NATIVE: request.param, "-O3": "-O2"}.get(option, option) for option in OPTIONS]
    own_name = f"-Dbaton=for_{request.param.rpartition('=')[2].replace('-', '_')}"
    subprocess.run([compiler(), *options, own_name, *(str(HERE / name) for name in SOURCES), "-o", str(path)], check=True)
    return path


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
            assert (got.float() - right).abs().max().item() < TOLERANCE[dtype] * max(1, dim // 256), (window, num_threads)


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (8, 1, 128), (1, 1, 96)])
def test_a_row_of_pairs_does_not_depend_on_those_beside_it(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """To the last bit: few rows, many rows, tiles of all sizes; one thread, so that no context is shared out. Without pairs a lone row is
    added up in another order."""
    kernels = load_kernels(1)
    if not kernels.multiplies_pairs:
        return
    cache = cache_of(kv_heads, dim, 16, torch.bfloat16, 2200 // 16)
    step = step_of(cache)
    num_tokens = step.segments[-1].token_begin + SEQUENCES[-1][0]
    query = torch.randn(heads, num_tokens, dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    together = kernel_of(kernels)(query, 1, step, dim**-0.5, window)
    for rows in (np.arange(0, num_tokens, 7), np.arange(3, num_tokens, 50)):
        alone = torch.empty(len(rows), heads, dim, dtype=torch.bfloat16)
        kernels.attend(query.transpose(0, 1)[rows].contiguous(), alone, cache, 1, step.tables_of(rows), Asked(dim**-0.5, window))
        assert torch.equal(alone, together[rows])


def float_step(step: AttentionStep) -> AttentionStep:
    """The same step over the same numbers in float32."""
    cache = step.cache
    wide = cache_of(cache.num_kv_heads, cache.head_dim, cache.block_size_tokens, torch.float32, cache.num_blocks)
    wide.blocks.copy_(cache.blocks)
    return AttentionStep(wide, step.segments, CausalMasks(torch.float32, cache.device), paged_attention)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_not_a_number_stays_so_and_with_its_sequence(library: Path, part: int) -> None:
    cache = cache_of(2, 64, 16, torch.bfloat16, 140)
    step = step_of(cache)
    query = torch.randn(4, step.segments[-1].token_begin + SEQUENCES[-1][0], 64).bfloat16()
    poisoned = step.segments[2]
    cache.blocks[int(poisoned.block_ids[3]), 1, part, 0, 5, 7] = float("nan")
    got = kernel_of(Kernels(library, 1))(query, 1, step, 0.125, None).isnan().flatten(1).any(dim=1)
    ends = [segment.token_begin for segment in step.segments] + [len(got)]
    assert [bool(got[begin:end].any()) for begin, end in pairwise(ends)] == [segment is poisoned for segment in step.segments]


@pytest.mark.parametrize("processor", FOREIGN)
def test_what_other_processors_run_compiles(processor: str) -> None:
    options = [processor if option == NATIVE else option for option in OPTIONS]
    for source in SOURCES:
        subprocess.run([compiler(), *options, "-fsyntax-only", str(HERE / source)], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_gate_are_those_of_torch(library: Path, dtype: torch.dtype) -> None:
    kernels = Kernels(library, 2)
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


@pytest.mark.parametrize("options", [OPTIONS, ("-O1", "-std=c++17", "-fPIC", "-shared")], ids=["in vectors", "one by one"])
@pytest.mark.parametrize("flush", [False, True])
def test_halves_are_those_of_numpy(tmp_path: Path, options: tuple[str, ...], flush: bool) -> None:
    """Every half to a float; back, all of these, what lies in the middle between two of them, its neighbours, and any bits at all. A
    thread that flushes subnormal floats gets the same."""
    (tmp_path / "halves.cpp").write_text(HALVES)
    subprocess.run([compiler(), *options, f"-I{HERE}", "halves.cpp", "-o", "halves.so"], cwd=tmp_path, check=True)
    halves = ctypes.CDLL(str(tmp_path / "halves.so"))
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = bits.view(np.float16).astype(np.float32)
        below, above = exact[:0x7C00], np.append(exact[1:0x7C00], np.float32(65536))  # the last middle is where infinity begins
        middle = (below + above) / 2
        near = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
        anything = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
        floats = np.ascontiguousarray(np.concatenate([exact, near, -near, anything]))
        right = floats.astype(np.float16)
    widened, narrowed = np.empty(bits.size, np.float32), np.empty(floats.size, np.float16)
    torch.set_flush_denormal(flush)
    try:
        halves.widen(ctypes.c_void_p(bits.ctypes.data), ctypes.c_void_p(widened.ctypes.data), ctypes.c_int64(bits.size))
        halves.narrow(ctypes.c_void_p(floats.ctypes.data), ctypes.c_void_p(narrowed.ctypes.data), ctypes.c_int64(floats.size))
    finally:
        torch.set_flush_denormal(False)
    for got, wanted, kind in ((widened, exact, np.uint32), (narrowed, right, np.uint16)):
        assert np.array_equal(np.isnan(got), np.isnan(wanted))
        numbers = ~np.isnan(wanted)
        assert np.array_equal(got.view(kind)[numbers], wanted.view(kind)[numbers])


def test_powers_of_two_are_near_and_nothing_of_them_is_undefined(tmp_path: Path) -> None:
    """In range, beyond it, and of what is not a number."""
    (tmp_path / "exp2.cpp").write_text(EXP2)
    subprocess.run([compiler(), "-O1", "-std=c++17", *TRAPS, f"-I{HERE}", "exp2.cpp", "-o", "exp2"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "exp2"], check=False).returncode == 0


def test_powers_of_two_of_scores_are_near(tmp_path: Path) -> None:
    """Of bfloat16 in pairs, where this processor has them; whole ones, and of what is not seen, are exact."""
    (tmp_path / "exp2.cpp").write_text(EXP2_OF_PAIRS)
    options = [option for option in OPTIONS if option not in ("-fPIC", "-shared")]
    subprocess.run([compiler(), *options, f"-I{HERE}", "exp2.cpp", "-o", "exp2"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "exp2"], check=False).returncode == 0


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    where = tmp_path_factory.mktemp("team")
    (where / "team.cpp").write_text(TEAM)
    subprocess.run([compiler(), *OPTIONS, f"-I{HERE}", "team.cpp", "-o", "team.so"], cwd=where, check=True)
    made = ctypes.CDLL(str(where / "team.so"))
    made.without_the_other.restype = made.one_after_another.restype = ctypes.c_int64
    return made


def test_who_is_held_up_between_two_items_holds_up_nobody(team: ctypes.CDLL) -> None:
    for count in (0, 1, 50):
        assert team.without_the_other(ctypes.c_int64(count)) == 3 * count


def test_each_item_is_done_once_after_all_of_the_loop_before(team: ctypes.CDLL) -> None:
    """With more threads than cores, and fewer."""
    for count in (1, 3, 40):
        right, value = 0, 1
        for _ in range(200):
            right += (value * count) % 1009
            value = right
        for threads in (1, 2, 9):
            assert team.one_after_another(threads, ctypes.c_int64(count), 200) == right, (count, threads)


def test_heads_that_are_not_those_of_the_cache_are_refused(library: Path) -> None:
    cache = cache_of(2, 64, 16, torch.float32, 140)
    step = step_of(cache)
    for heads, dim in ((5, 64), (4, 32)):
        with pytest.raises(LayoutMismatch, match="2 KV heads of 64"):
            kernel_of(Kernels(library, 1))(torch.zeros(heads, 5, dim), 1, step, 1.0, None)


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


def test_processes_that_start_together_compile_once_and_old_libraries_go(tmp_path: Path) -> None:
    """The compiler is a script that notes each call and makes an empty library."""
    script = tmp_path / "bin" / "c++"
    script.parent.mkdir()
    script.write_text(NOTING_COMPILER)
    script.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for number in range(MAX_KEPT + 2):
        (cache / f"kernels-{number}.so").touch()
    (cache / "building-killed").mkdir()
    (cache / "building-killed" / "kernels.so").touch()
    code = f"from pathlib import Path; from baton.engine.model.native.build import build; build(Path({str(cache)!r}))"
    env = {"PATH": f"{script.parent}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
    for process in [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(3)]:
        assert process.wait(60) == 0
    assert (tmp_path / "calls").read_text() == "x\n"
    assert len(list(cache.glob("kernels-*.so"))) == MAX_KEPT
    assert not list(cache.glob("building-*")), "what a process left that was killed"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "n"),
    [(1, 64, 64), (4, 1030, 70), (5, 2, 7), (6, 256, 130), (9, 66, 70), (13, 4100, 65), (97, 66, 200), (110, 4100, 130), (200, 2048, 64)],
)
def test_products(library: Path, rows: int, k: int, n: int, with_bias: bool, num_threads: int) -> None:
    """Outputs and rows that fill no panel or block, more inputs than one stretch."""
    kernels = Kernels(library, num_threads)
    torch.manual_seed(0)
    modules = [nn.Linear(k, part, bias=with_bias).bfloat16().requires_grad_(False) for part in (n - n // 3, n // 3)]
    x = torch.randn(rows, k).bfloat16()
    found = Product(kernels, *modules)(x)
    wanted = torch.cat(
        [nn.functional.linear(x.double(), m.weight.double(), m.bias.double() if with_bias else None) for m in modules], dim=1
    )
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=2**-8)
    unrounded = Product(kernels, *modules, dtype=torch.float32)(x)
    torch.testing.assert_close(unrounded.double(), wanted, atol=2e-4, rtol=1e-5)
    assert torch.equal(unrounded.bfloat16(), found)
    alone = torch.cat([Product(kernels, *modules)(row[None]) for row in x[:7]])
    assert torch.equal(found[:7], alone), "a row does not depend on those beside it"


def test_words_lie_one_after_the_other_and_outlive_whoever_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "_CHUNK_WORDS", 1024)
    words = Words()
    taken = [words.take(count) for count in (100, 1, 900, 5, 3000, 16)]
    assert [part.numel() for part in taken] == [100, 1, 900, 5, 3000, 16]
    assert all(part.data_ptr() % 64 == 0 for part in taken)
    del words
    for number, part in enumerate(taken):
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(taken)), "none overlaps another"


def test_a_product_needs_pairs() -> None:
    with pytest.raises(LayoutMismatch, match="no pairs"):
        Product(load_kernels(1), nn.Linear(7, 8).bfloat16())
