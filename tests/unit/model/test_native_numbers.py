"""Compares float16 conversion and 2^x of the C++ kernels with numpy and the C library."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.model.kernels.cpu.kernel_build import HERE, OPTIONS, find_compiler
from tests.unit.model.native_libraries import bf16_program_status

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
    using baton::fast_exp2;
    for (float x = -126.0f; x <= 127.0f; x += 0.01f)
        if (!(std::abs(fast_exp2(x) / std::exp2(double(x)) - 1.0) < 3e-7)) return 1;
    if (fast_exp2(-1e30f) != std::exp2(-126.0f) || fast_exp2(INFINITY) != std::exp2(127.0f)) return 2;
    return std::isnan(fast_exp2(NAN)) ? 0 : 3;
}
"""
EXP2_BF16 = """
#include <cmath>
#include "attention_bf16_dot.h"
int main() {
#ifdef BATON_HAS_BF16_DOT
    using namespace baton;
    alignas(64) float found[BF16_LANES];
    for (float x = -126.0f; x <= 0.0f; x += 0.01f) {
        _mm512_store_ps(found, fast_exp2_bf16(_mm512_set1_ps(x)));
        if (!(std::abs(found[3] / std::exp2(double(x)) - 1.0) < 3e-6)) return 1;
    }
    for (float x : {0.0f, -1.0f, -20.0f, MASKED_SCORE, NAN}) {
        _mm512_store_ps(found, fast_exp2_bf16(_mm512_set1_ps(x)));
        if (found[5] != std::exp2(x) && x == x) return 2;
        if (std::isnan(found[5]) != std::isnan(x)) return 3;
    }
    return 0;
#else
    return 9;
#endif
}
"""
DOT_AS_FLOATS = """
#include "bf16_floats.h"
int main() {
#ifdef BATON_HAS_BF16_DOT
    using namespace baton;
    constexpr int INPUTS = Bf16Floats::SLICE, ROWS = ROWS_PER_PASS;
    alignas(64) static Bf16 rows[ROWS * INPUTS], weights[INPUTS * PANEL];
    static float floats[ROWS * INPUTS];
    alignas(64) static float dot[ROWS * PANEL], as_floats[ROWS * PANEL], widened[ROWS * PANEL];
    const WeightFormat format{WEIGHT_BFLOAT16, 16, 1, 0, {}, {}, 0, {}};
    static Bf16Floats::Workspace workspace;
    static Bf16Dot::Workspace none;
    uint64_t state = 1;
    const auto next = [&](int kind) -> uint16_t {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint16_t bits = uint16_t(state >> 40), exponent = kind == 0 ? 110 + (bits >> 7 & 31)
            : kind == 1 ? 50 + (bits >> 7 & 31) : kind == 2 ? bits >> 7 & 3 : bits >> 7 & 255;
        return uint16_t((bits & 0x807f) | exponent << 7);
    };
    // Sizes around 1; whose products are subnormal; that are subnormal times ones that are not; all bits.
    for (int round = 0; round < 400; round++) {
        const int kind = round % 4;
        for (Bf16& one : rows) one = {next(kind)};
        for (Bf16& one : weights) one = {next(kind == 2 ? 0 : kind)};
        for (int i = 0; i < ROWS * INPUTS; i++) floats[i] = to_float(rows[i]);
        for (int i = 0; i < ROWS * PANEL; i++) dot[i] = as_floats[i] = widened[i] = to_float(Bf16{next(kind)});
        const PanelSlice slice{reinterpret_cast<const uint8_t*>(weights), sizeof weights, 0, INPUTS, round % 8 < 4};
        Bf16Dot(format).open(slice, ROWS, none, [&](const auto& view) {
            multiply_rows(view, Bf16Rows{rows, INPUTS}, 0, ROWS, dot, {});
        });
        Bf16Floats(format).open(slice, 1, workspace, [&](const auto& view) {
            multiply_rows(view, FloatRows{floats, INPUTS}, 0, ROWS, as_floats, {});
        });
        Bf16Floats(format).open(slice, 1000, workspace, [&](const auto& view) {
            multiply_rows(view, FloatRows{floats, INPUTS}, 0, ROWS, widened, {});
        });
        for (int i = 0; i < ROWS * PANEL; i++)
            for (float other : {as_floats[i], widened[i]})
                if (bits_from_float(dot[i]) != bits_from_float(other) && !(dot[i] != dot[i] && other != other))
                    return __builtin_cpu_is("intel") || prefers_floats() ? 1 + kind : 0;
    }
    return 0;
#else
    return 9;
#endif
}
"""
TRAPS = ("-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error")
"""What C++ leaves undefined ends the program."""


@pytest.mark.parametrize(
    "options", [OPTIONS, ("-O1", "-std=c++17", "-fPIC", "-shared")], ids=["in vectors", "one by one"]
)
@pytest.mark.parametrize("flush", [False, True])
def test_float16_conversion_equals_numpy(tmp_path: Path, options: tuple[str, ...], flush: bool) -> None:
    """Convert every float16 to float. Convert back all of these, all midpoints, their neighbours, and random
    bits.

    Repeat it in a thread that flushes subnormal floats.
    """
    (tmp_path / "halves.cpp").write_text(HALVES)
    subprocess.run([find_compiler(), *options, f"-I{HERE}", "halves.cpp", "-o", "halves.so"], cwd=tmp_path, check=True)
    halves = ctypes.CDLL(str(tmp_path / "halves.so"))
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = bits.view(np.float16).astype(np.float32)
        below, above = (
            exact[:0x7C00],
            np.append(exact[1:0x7C00], np.float32(65536)),
        )  # beyond the last midpoint is infinity
        middle = (below + above) / 2
        near = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
        anything = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
        floats = np.ascontiguousarray(np.concatenate([exact, near, -near, anything]))
        right = floats.astype(np.float16)
    widened, narrowed = np.empty(bits.size, np.float32), np.empty(floats.size, np.float16)
    torch.set_flush_denormal(flush)
    try:
        halves.widen(ctypes.c_void_p(bits.ctypes.data), ctypes.c_void_p(widened.ctypes.data), ctypes.c_int64(bits.size))
        halves.narrow(
            ctypes.c_void_p(floats.ctypes.data), ctypes.c_void_p(narrowed.ctypes.data), ctypes.c_int64(floats.size)
        )
    finally:
        torch.set_flush_denormal(False)
    for got, expected, kind in ((widened, exact, np.uint32), (narrowed, right, np.uint16)):
        assert np.array_equal(np.isnan(got), np.isnan(expected))
        numbers = ~np.isnan(expected)
        assert np.array_equal(got.view(kind)[numbers], expected.view(kind)[numbers])


def test_fast_exp2_is_accurate_without_undefined_behaviour(tmp_path: Path) -> None:
    """Test values in range, beyond it, and NaN."""
    (tmp_path / "exp2.cpp").write_text(EXP2)
    subprocess.run(
        [find_compiler(), "-O1", "-std=c++17", *TRAPS, f"-I{HERE}", "exp2.cpp", "-o", "exp2"], cwd=tmp_path, check=True
    )
    assert subprocess.run([tmp_path / "exp2"], check=False).returncode == 0


@pytest.mark.parametrize("source", [EXP2_BF16, DOT_AS_FLOATS], ids=["exp2", "dot product as floats"])
def test_numbers_of_bfloat16_are_right(tmp_path: Path, source: str) -> None:
    """For AVX512-BF16. 2^x is accurate; integers and masked scores are exact.

    Products of floats have the bits of Intel's dot product. Where they have not, they are not used.
    """
    assert bf16_program_status(source, tmp_path) == 0
