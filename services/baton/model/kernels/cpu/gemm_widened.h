// Part of gemm.h: multiplies rows by a slice in floats, for processors without a bfloat16 dot product. The
// two halves of a word, each the upper half of a float, are multiplied one after the other.
#pragma once

#include "simd.h"

namespace baton {

constexpr int SLICE_PAIRS = 512;  // six rows of a slice, as floats, fit into the L1 cache
// Not a power of two: rows would evict each other from the L1 cache.
constexpr int ROW_FLOATS = 2 * SLICE_PAIRS + 16;

// The even or odd inputs of the pairs, as floats.
template <bool IS_ODD>
inline FloatVec half_of(WordVec packed) {
    return FloatVec(IS_ODD ? packed & 0xffff0000u : packed << 16);
}

// Number of vectors of sums per row, for that many rows: as many as fit into the registers, beside one vector
// of weights each, an input and the mask. A single row uses each weight vector immediately, so it needs only
// one.
constexpr int vectors_with(int rows) {
    int vectors = PANEL / VECTOR_FLOATS;
    while (vectors > 1 && rows * vectors + (rows > 1 ? vectors : 1) + 2 > NUM_REGISTERS) vectors /= 2;
    return vectors;
}

constexpr int passes_with(int rows) { return PANEL / VECTOR_FLOATS / vectors_with(rows); }

inline int passes_over(int rows) {
    const int rest = rows % ROWS_PER_PASS;
    return rows / ROWS_PER_PASS * passes_with(ROWS_PER_PASS) + (rest ? passes_with(rest) : 0);
}

// acc += one input of each row times that half of its words.
template <bool IS_ODD, int ROWS, int VECTORS>
inline void add_half(FloatVec (&acc)[ROWS][VECTORS], const uint32_t* packed, const float* x) {
    FloatVec lanes[VECTORS];
    for (int v = 0; v < VECTORS; v++) lanes[v] = half_of<IS_ODD>(load_vector<WordVec>(packed + v * VECTOR_FLOATS));
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] += lanes[v] * x[r * ROW_FLOATS];
}

template <int ROWS, typename Out>
inline void multiply_rows(
    int row, const Bf16* x, int64_t x_stride, const PanelSlice& slice, float* sums, const PanelOutput<Out>& output,
        WeightPrefetch& prefetch) {
    constexpr int VECTORS = vectors_with(ROWS);
    sums += row * PANEL;
    alignas(VECTOR_BYTES) float floats[ROWS * ROW_FLOATS];
    for (int r = 0; r < ROWS; r++) {
        const Bf16* from = x + (row + r) * x_stride;
        for (int i = 0; i < 2 * slice.pairs; i++) floats[r * ROW_FLOATS + i] = to_float(from[i]);
    }
    for (int first = 0; first < output.columns; first += VECTORS * VECTOR_FLOATS) {
        FloatVec acc[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = slice.is_first ? FloatVec{}
                    : load_vector<FloatVec>(sums + r * PANEL + first + v * VECTOR_FLOATS);
        for (int pair = 0; pair < slice.pairs; pair++) {
            if (pair % PREFETCH_EVERY_PAIRS == 0) prefetch.fetch();
            const uint32_t* packed = slice.packed + size_t(pair) * PANEL + first;
            add_half<false>(acc, packed, floats + 2 * pair);
            add_half<true>(acc, packed, floats + 2 * pair + 1);
        }
        for (int r = 0; r < ROWS; r++) {
            for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + first + v * VECTOR_FLOATS, acc[r][v]);
            if (!slice.is_last) continue;
            const int count = std::min(VECTORS * VECTOR_FLOATS, output.columns - first);
            const float* sum = sums + r * PANEL + first;
            Out* out = output.out + (row + r) * output.stride + first;
            for (int i = 0; i < count; i++) out[i]
                = from_float<Out>(output.bias ? sum[i] + to_float(output.bias[first + i]) : sum[i]);
        }
    }
}

}  // namespace baton
