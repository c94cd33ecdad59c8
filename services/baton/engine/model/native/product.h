// Products of bfloat16 matrices, x [rows, k] times weights [n, k] transposed, with the dot product of pairs.
//
// Weights are packed once into panels of 64 outputs: for each pair of inputs its 64 words, so that a lane is an output and no sum runs
// across lanes. Six rows of x go over a panel at a time (24 sums in registers), in stretches of the panel that stay in the second cache.
#pragma once

#include "numbers.h"
#include "pairs.h"

#ifdef BATON_PAIRS

#include <algorithm>

namespace baton {

constexpr int PANEL = 64;
constexpr int VECTOR = 16;
constexpr int VECTORS = PANEL / VECTOR;
constexpr int STRETCH_PAIRS = 1024;
constexpr int BLOCK_ROWS = 96;

// words: [n / 64 rounded up, k / 2, 64]; bias [n] or null.
struct Product {
    const uint32_t* words;
    const Bf16* bias;
    int64_t n;
    int64_t k;

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

inline void pack_panel(const Bf16* weights, int64_t n, int64_t k, int64_t panel, uint32_t* words) {
    for (int64_t pair = 0; pair < k / 2; pair++) {
        for (int lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            uint32_t word = 0;
            if (output < n) std::memcpy(&word, weights + output * k + 2 * pair, sizeof word);
            words[(panel * (k / 2) + pair) * PANEL + lane] = word;
        }
    }
}

template <int ROWS>
inline void multiply_panel(float* sums, const uint32_t* x, int64_t x_stride, const uint32_t* words, int pairs, bool is_first) {
    __m512 held[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) held[r][v] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
    for (int pair = 0; pair < pairs; pair++) {
        __m512bh lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++) lanes[v] = __m512bh(_mm512_loadu_si512(words + size_t(pair) * PANEL + v * VECTOR));
        for (int r = 0; r < ROWS; r++) {
            const __m512bh both = __m512bh(_mm512_set1_epi32(int(x[r * x_stride + pair])));
            for (int v = 0; v < VECTORS; v++) held[r][v] = _mm512_dpbf16_ps(held[r][v], lanes[v], both);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, held[r][v]);
}

inline void multiply_rows_of(float* sums, const uint32_t* x, int64_t x_stride, int rows, const uint32_t* words, int pairs, bool is_first) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) multiply_panel<6>(sums + r * PANEL, x + r * x_stride, x_stride, words, pairs, is_first);
    sums += r * PANEL;
    x += r * x_stride;
    switch (rows - r) {
        case 5: return multiply_panel<5>(sums, x, x_stride, words, pairs, is_first);
        case 4: return multiply_panel<4>(sums, x, x_stride, words, pairs, is_first);
        case 3: return multiply_panel<3>(sums, x, x_stride, words, pairs, is_first);
        case 2: return multiply_panel<2>(sums, x, x_stride, words, pairs, is_first);
        case 1: return multiply_panel<1>(sums, x, x_stride, words, pairs, is_first);
        default: return;
    }
}

// out [rows, n] bfloat16. By all threads of a team, which wait for each other at its end.
inline void product(const Bf16* x, const Product& by, Bf16* out, int64_t rows) {
    const int64_t pairs = by.k / 2, panels = by.panels(), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t block = 0; block < blocks; block++) {
        for (int64_t panel = 0; panel < panels; panel++) {
            alignas(64) float sums[BLOCK_ROWS * PANEL];
            const int64_t begin = block * BLOCK_ROWS;
            const int count = int(std::min<int64_t>(BLOCK_ROWS, rows - begin));
            const auto* left = reinterpret_cast<const uint32_t*>(x + begin * by.k);
            for (int64_t pair = 0; pair < pairs; pair += STRETCH_PAIRS) {
                const int stretch = int(std::min<int64_t>(STRETCH_PAIRS, pairs - pair));
                multiply_rows_of(sums, left + pair, pairs, count, by.words + (panel * pairs + pair) * PANEL, stretch, pair == 0);
            }
            for (int v = 0; v < VECTORS; v++) {
                const int64_t first = panel * PANEL + v * VECTOR;
                if (first >= by.n) break;
                const __mmask16 is_output = by.n - first >= VECTOR ? __mmask16(0xffff) : __mmask16((1u << (by.n - first)) - 1);
                __m512 bias = _mm512_setzero_ps();
                if (by.bias) {
                    const __m256i halves = _mm256_maskz_loadu_epi16(is_output, by.bias + first);
                    bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
                }
                for (int r = 0; r < count; r++) {
                    const __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + r * PANEL + v * VECTOR), bias);
                    _mm256_mask_storeu_epi16(out + (begin + r) * by.n + first, is_output, __m256i(_mm512_cvtneps_pbh(sum)));
                }
            }
        }
    }
}

}  // namespace baton

#endif
