// Products of bfloat16 matrices, x [rows, k] times weights [n, k] transposed, with sums in float.
//
// Weights are packed once into panels of 64 outputs: for each pair of inputs its 64 words, so that a lane is an output and no sum runs
// across lanes. Six rows of x go over a panel at a time, in stretches of the panel that stay in the second cache; while the rows of a block
// are multiplied by one stretch, the next comes from memory. How a few rows are multiplied by a stretch is the processor's: gemm_bf16.h
// or gemm_widened.h.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "bf16_dot.h"
#include "parallel_for.h"

namespace baton {

constexpr int PANEL = 64;
constexpr int BLOCK_ROWS = 96;
constexpr int ROWS_AT_ONCE = 6;
constexpr int AHEAD_PAIRS = 4;

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
            words[(panel * (k / 2) + pair) * PANEL + lane] = output < n ? pair_at(weights + output * k + 2 * pair) : 0;
        }
    }
}

// Words that are needed next, fetched into the second cache while others are multiplied, so many lines every AHEAD_PAIRS pairs.
struct Ahead {
    const char* at = nullptr;
    const char* end = nullptr;
    int lines = 0;

    void fetch() {
        for (int i = 0; i < lines && at < end; i++, at += LINE_BYTES) __builtin_prefetch(at, 0, 2);
    }
};

// Of a panel. Between its stretches the sums of all rows, [rows, 64], wait in memory.
struct Stretch {
    const uint32_t* words;
    int pairs;
    bool is_first;
    bool is_last;
};

// Where the outputs of a panel go, of which there are `columns`; bias [columns] or null. Out: Bf16, or float for what is not rounded.
template <typename Out>
struct Columns {
    Out* out;
    int64_t stride;
    const Bf16* bias;
    int columns;
};

}  // namespace baton

// Each of the two defines
//   STRETCH_PAIRS: of a stretch, at most
//   passes_over(rows): how many times a stretch's pairs are gone through
//   multiply_rows<ROWS>(row, x, x_stride, by, sums, to, ahead): ROWS rows of x, from `row` on, of which each has its pairs one after the
//     other and is x_stride numbers from the next, by a stretch.
#ifdef BATON_PAIRS
#include "gemm_bf16.h"
#else
#include "gemm_widened.h"
#endif

namespace baton {

template <typename Out>
inline void multiply_block(
    int rows, const Bf16* x, int64_t x_stride, const Stretch& by, float* sums, const Columns<Out>& to, Ahead ahead) {
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
    const int passes = passes_over(rows);
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
        const Bf16* left = x + begin * by.k;
        const int columns = int(std::min<int64_t>(PANEL, by.n - first));
        const Columns<Out> to{out + begin * by.n + first, by.n, by.bias ? by.bias + first : nullptr, columns};
        for (int64_t pair = 0; pair < pairs; pair += STRETCH_PAIRS) {
            const int length = int(std::min<int64_t>(STRETCH_PAIRS, pairs - pair));
            const Stretch stretch{by.words + (panel * pairs + pair) * PANEL, length, pair == 0, pair + length == pairs};
            const Ahead ahead = behind(by, panel, pair, count, block + 1 == blocks, threads);
            multiply_block(count, left + 2 * pair, by.k, stretch, sums, to, ahead);
        }
    });
}

}  // namespace baton
