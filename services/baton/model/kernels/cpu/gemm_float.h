// Multiplies float matrices with the loops of gemm.h: weights are packed in panels of 64 outputs, one word per
// input and output.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace baton {

constexpr int SLICE_INPUTS = 512;  // a slice of a panel, 128 KiB, fits into the L2 cache

// packed: [n / 64 rounded up, k, 64]; bias: [n] or null.
struct PackedFloats {
    const float* packed;
    const float* bias;
    int64_t n;
    int64_t k;

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

inline void pack_panel(const float* weights, int64_t n, int64_t k, int64_t panel, float* packed) {
    for (int64_t input = 0; input < k; input++) {
        for (int lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            packed[(panel * k + input) * PANEL + lane] = output < n ? weights[output * k + input] : 0.0f;
        }
    }
}

// Vectors of sums per row that fit into the registers, beside a vector of weights each and an input.
constexpr int float_vectors_with(int rows) {
    int vectors = PANEL / VECTOR_FLOATS;
    while (vectors > 1 && rows * vectors + vectors + 1 > NUM_REGISTERS) vectors /= 2;
    return vectors;
}

// sums [ROWS, 64] += x [ROWS, inputs], rows x_stride apart, times a slice of a panel.
template <int ROWS>
inline void add_rows(const float* x, int64_t x_stride, const float* packed, int inputs, float* sums) {
    constexpr int VECTORS = float_vectors_with(ROWS);
    for (int first = 0; first < PANEL; first += VECTORS * VECTOR_FLOATS) {
        FloatVec acc[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = load_vector<FloatVec>(sums + r * PANEL + first + v * VECTOR_FLOATS);
        for (int i = 0; i < inputs; i++) {
            FloatVec lanes[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                lanes[v] = load_vector<FloatVec>(packed + size_t(i) * PANEL + first + v * VECTOR_FLOATS);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) acc[r][v] += lanes[v] * x[r * x_stride + i];
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + first + v * VECTOR_FLOATS, acc[r][v]);
    }
}

// Multiplies `count` rows of x by one panel, see multiply_panel in gemm.h.
inline void multiply_panel(const float* x, const PackedFloats& weights, float* out, int count, int64_t panel,
    bool, int) {
    alignas(64) float sums[ROWS_PER_BLOCK * PANEL];
    std::fill(sums, sums + count * PANEL, 0.0f);
    for (int64_t begin = 0; begin < weights.k; begin += SLICE_INPUTS) {
        const int inputs = int(std::min<int64_t>(SLICE_INPUTS, weights.k - begin));
        const float* packed = weights.packed + (panel * weights.k + begin) * PANEL;
        int row = 0;
        const auto add = [&](auto at_once) {
            constexpr int ROWS = decltype(at_once)::value;
            for (; row + ROWS <= count; row += ROWS)
                add_rows<ROWS>(x + row * weights.k + begin, weights.k, packed, inputs, sums + row * PANEL);
        };
        add(std::integral_constant<int, ROWS_PER_PASS>());
        add(std::integral_constant<int, 4>());
        add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 1>());
    }
    const int64_t first = panel * PANEL;
    const int columns = int(std::min<int64_t>(PANEL, weights.n - first));
    for (int r = 0; r < count; r++)
        for (int i = 0; i < columns; i++)
            out[r * weights.n + first + i] = weights.bias ? sums[r * PANEL + i] + weights.bias[first + i]
                : sums[r * PANEL + i];
}

}  // namespace baton
