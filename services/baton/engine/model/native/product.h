// Products of bfloat16 matrices, x [rows, k] times weights [n, k] transposed, with the dot product of pairs.
//
// Weights are packed once into panels of 64 outputs: for each pair of inputs its 64 words, so that a lane is an output and no sum runs
// across lanes. Six rows of x go over a panel at a time (24 sums in registers), in stretches of the panel that stay in the second cache;
// while the rows of a block are multiplied by one stretch, the next comes from memory.
#pragma once

#include "numbers.h"
#include "pairs.h"
#include "team.h"

#ifdef BATON_PAIRS

#include <algorithm>

namespace baton {

constexpr int PANEL = 64;
constexpr int VECTOR = 16;
constexpr int VECTORS = PANEL / VECTOR;
constexpr int STRETCH_PAIRS = 1024;
constexpr int BLOCK_ROWS = 96;
constexpr int ROWS_AT_ONCE = 6;
constexpr int AHEAD_PAIRS = 4;
constexpr int LINE_BYTES = 64;  // of the processor's caches

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

// Words that are needed next, fetched into the second cache while others are multiplied, so many lines every AHEAD_PAIRS pairs.
struct Ahead {
    const char* at = nullptr;
    const char* end = nullptr;
    int lines = 0;

    void fetch() {
        for (int i = 0; i < lines && at < end; i++, at += LINE_BYTES) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// Of a panel. Between its stretches the sums of all rows, [rows, 64], wait in memory.
struct Stretch {
    const uint32_t* words;
    int pairs;
    bool is_first;
    bool is_last;
};

inline void store(Bf16* to, __mmask16 lanes, __m512 values) { _mm256_mask_storeu_epi16(to, lanes, __m256i(_mm512_cvtneps_pbh(values))); }
inline void store(float* to, __mmask16 lanes, __m512 values) { _mm512_mask_storeu_ps(to, lanes, values); }

// Where the outputs of a panel go, of which there are `columns`; bias [columns] or null. Out: Bf16, or float for what is not rounded.
template <typename Out>
struct Columns {
    Out* out;
    int64_t stride;
    const Bf16* bias;
    int columns;

    void write(const __m512* sums, int64_t row) const {
        for (int v = 0; v < VECTORS && v * VECTOR < columns; v++) {
            const int left = columns - v * VECTOR;
            const __mmask16 is_output = left >= VECTOR ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
            __m512 sum = sums[v];
            if (bias) {
                const __m256i halves = _mm256_maskz_loadu_epi16(is_output, bias + v * VECTOR);
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
            }
            store(out + row * stride + v * VECTOR, is_output, sum);
        }
    }
};

template <int ROWS, typename Out>
inline void multiply_rows(
    int row, const uint32_t* x, int64_t x_stride, const Stretch& by, float* sums, const Columns<Out>& to, Ahead& ahead) {
    __m512 held[ROWS][VECTORS];
    sums += row * PANEL;
    x += row * x_stride;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) held[r][v] = by.is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
    for (int pair = 0; pair < by.pairs; pair++) {
        if (pair % AHEAD_PAIRS == 0) ahead.fetch();
        __m512bh lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++) lanes[v] = __m512bh(_mm512_loadu_si512(by.words + size_t(pair) * PANEL + v * VECTOR));
        for (int r = 0; r < ROWS; r++) {
            const __m512bh both = __m512bh(_mm512_set1_epi32(int(x[r * x_stride + pair])));
            for (int v = 0; v < VECTORS; v++) held[r][v] = _mm512_dpbf16_ps(held[r][v], lanes[v], both);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        if (by.is_last) {
            to.write(held[r], row + r);
        } else {
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, held[r][v]);
        }
    }
}

template <typename Out>
inline void multiply_block(
    int rows, const uint32_t* x, int64_t x_stride, const Stretch& by, float* sums, const Columns<Out>& to, Ahead ahead) {
    int row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) multiply_rows<ROWS_AT_ONCE>(row, x, x_stride, by, sums, to, ahead);
    switch (rows - row) {
        case 5: return multiply_rows<5>(row, x, x_stride, by, sums, to, ahead);
        case 4: return multiply_rows<4>(row, x, x_stride, by, sums, to, ahead);
        case 3: return multiply_rows<3>(row, x, x_stride, by, sums, to, ahead);
        case 2: return multiply_rows<2>(row, x, x_stride, by, sums, to, ahead);
        case 1: return multiply_rows<1>(row, x, x_stride, by, sums, to, ahead);
        default: return;
    }
}

// What comes behind a stretch. Behind the last one of a panel, this thread most likely goes on with the panel that is `threads` further on.
// Where a panel is gone over once or twice, it waits for memory anyway, and the processor sees by itself what comes next.
inline Ahead behind(const Product& by, int64_t panel, int64_t pair, int rows, bool is_last_block, int threads) {
    const int64_t pairs = by.k / 2, stretch = std::min<int64_t>(STRETCH_PAIRS, pairs - pair);
    const bool is_last = pair + stretch == pairs;
    const int passes = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    if (passes < 3 || (is_last && is_last_block && panel + threads >= by.panels())) return {};
    const int64_t begin = is_last ? (panel + threads) % by.panels() * pairs : panel * pairs + pair + stretch;
    const int64_t length = std::min<int64_t>(STRETCH_PAIRS, is_last ? pairs : pairs - pair - stretch);
    const auto* at = reinterpret_cast<const char*>(by.words + begin * PANEL);
    const int64_t bytes = length * PANEL * int64_t(sizeof(uint32_t)), times = passes * ((stretch + AHEAD_PAIRS - 1) / AHEAD_PAIRS);
    return {at, at + bytes, int((bytes / LINE_BYTES + times - 1) / times)};
}

// out [rows, n]. By a team of `threads`.
template <typename Out>
void product(Member& member, const Bf16* x, const Product& by, Out* out, int64_t rows, int threads) {
    const int64_t pairs = by.k / 2, panels = by.panels(), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    member.each(blocks * panels, [&](int64_t item) {
        alignas(64) float sums[BLOCK_ROWS * PANEL];
        const int64_t block = item / panels, panel = item % panels, begin = block * BLOCK_ROWS, first = panel * PANEL;
        const int count = int(std::min<int64_t>(BLOCK_ROWS, rows - begin));
        const auto* left = reinterpret_cast<const uint32_t*>(x + begin * by.k);
        const int columns = int(std::min<int64_t>(PANEL, by.n - first));
        const Columns<Out> to{out + begin * by.n + first, by.n, by.bias ? by.bias + first : nullptr, columns};
        for (int64_t pair = 0; pair < pairs; pair += STRETCH_PAIRS) {
            const int length = int(std::min<int64_t>(STRETCH_PAIRS, pairs - pair));
            const Stretch stretch{by.words + (panel * pairs + pair) * PANEL, length, pair == 0, pair + length == pairs};
            const Ahead ahead = behind(by, panel, pair, count, block + 1 == blocks, threads);
            multiply_block(count, left + pair, pairs, stretch, sums, to, ahead);
        }
    });
}

}  // namespace baton

#endif
