// A few rows times a stretch, in floats, for a processor without a dot product of pairs: a word's halves, each the upper half of a float,
// are multiplied one after the other. A part of gemm.h.
#pragma once

#include "simd.h"

namespace baton {

constexpr int STRETCH_PAIRS = 512;  // six rows of it, as floats, stay in the first cache
constexpr int ROW_FLOATS = 2 * STRETCH_PAIRS + 16;  // no power of two: rows would push each other out of that cache

// The even inputs of pairs, or the odd ones.
template <bool IS_ODD>
inline Floats half_of(Words words) {
    return Floats(IS_ODD ? words & 0xffff0000u : words << 16);
}

// So many vectors of sums for each of so many rows: as many as fit into registers beside a vector of weights each (one row uses them straight
// away), an input and the mask of odd ones.
constexpr int vectors_with(int rows) {
    int vectors = PANEL / LANE_FLOATS;
    while (vectors > 1 && rows * vectors + (rows > 1 ? vectors : 1) + 2 > REGISTERS) vectors /= 2;
    return vectors;
}

constexpr int passes_with(int rows) { return PANEL / LANE_FLOATS / vectors_with(rows); }

inline int passes_over(int rows) {
    const int rest = rows % ROWS_AT_ONCE;
    return rows / ROWS_AT_ONCE * passes_with(ROWS_AT_ONCE) + (rest ? passes_with(rest) : 0);
}

// held += one input of each row, x, times that half of its words.
template <bool IS_ODD, int ROWS, int VECTORS>
inline void add_half(Floats (&held)[ROWS][VECTORS], const uint32_t* words, const float* x) {
    Floats lanes[VECTORS];
    for (int v = 0; v < VECTORS; v++) lanes[v] = half_of<IS_ODD>(vector_at<Words>(words + v * LANE_FLOATS));
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) held[r][v] += lanes[v] * x[r * ROW_FLOATS];
}

template <int ROWS, typename Out>
inline void multiply_rows(
    int row, const Bf16* x, int64_t x_stride, const Stretch& by, float* sums, const Columns<Out>& to, Ahead& ahead) {
    constexpr int VECTORS = vectors_with(ROWS);
    sums += row * PANEL;
    alignas(LANE_BYTES) float floats[ROWS * ROW_FLOATS];
    for (int r = 0; r < ROWS; r++) {
        const Bf16* from = x + (row + r) * x_stride;
        for (int i = 0; i < 2 * by.pairs; i++) floats[r * ROW_FLOATS + i] = to_float(from[i]);
    }
    for (int first = 0; first < to.columns; first += VECTORS * LANE_FLOATS) {
        Floats held[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                held[r][v] = by.is_first ? Floats{} : vector_at<Floats>(sums + r * PANEL + first + v * LANE_FLOATS);
        for (int pair = 0; pair < by.pairs; pair++) {
            if (pair % AHEAD_PAIRS == 0) ahead.fetch();
            const uint32_t* words = by.words + size_t(pair) * PANEL + first;
            add_half<false>(held, words, floats + 2 * pair);
            add_half<true>(held, words, floats + 2 * pair + 1);
        }
        for (int r = 0; r < ROWS; r++) {
            for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + first + v * LANE_FLOATS, held[r][v]);
            if (!by.is_last) continue;
            const int count = std::min(VECTORS * LANE_FLOATS, to.columns - first);
            const float* sum = sums + r * PANEL + first;
            Out* out = to.out + (row + r) * to.stride + first;
            for (int i = 0; i < count; i++) out[i] = from_float<Out>(to.bias ? sum[i] + to_float(to.bias[first + i]) : sum[i]);
        }
    }
}

}  // namespace baton
