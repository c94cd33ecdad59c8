// Multiplies bfloat16 matrices: x [rows, k] times weights [n, k] transposed, accumulated in float.
//
// Weights are packed once into panels of 64 outputs. For each pair of inputs a panel holds 64 words, one per
// output. So a SIMD lane is an output, and no sum crosses lanes. Six rows of x are multiplied by a panel at a
// time, in slices of the panel that fit into the L2 cache. While the rows of a block are multiplied by one
// slice, the next one is prefetched. gemm_bf16.h and gemm_widened.h multiply a few rows by a slice.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "bf16_dot.h"
#include "parallel_for.h"

namespace baton {

constexpr int PANEL = 64;
constexpr int ROWS_PER_BLOCK = 96;
constexpr int ROWS_PER_PASS = 6;
constexpr int PREFETCH_EVERY_PAIRS = 4;

// packed: [n / 64 rounded up, k / 2, 64]; bias: [n] or null.
struct PackedWeights {
    const uint32_t* packed;
    const Bf16* bias;
    int64_t n;
    int64_t k;

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

inline void pack_panel(const Bf16* weights, int64_t n, int64_t k, int64_t panel, uint32_t* packed) {
    for (int64_t pair = 0; pair < k / 2; pair++) {
        for (int lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            packed[(panel * (k / 2) + pair) * PANEL + lane] = output < n
                ? load_bf16_pair(weights + output * k + 2 * pair) : 0;
        }
    }
}

// Prefetches the next weights into the L2 cache, a few cache lines every PREFETCH_EVERY_PAIRS pairs.
struct WeightPrefetch {
    const char* at = nullptr;
    const char* end = nullptr;
    int lines = 0;

    void fetch() {
        for (int i = 0; i < lines && at < end; i++, at += CACHE_LINE_BYTES) __builtin_prefetch(at, 0, 2);
    }
};

// A slice of a panel along k. Between slices the sums of all rows, [rows, 64], are kept in memory.
struct PanelSlice {
    const uint32_t* packed;
    int pairs;
    bool is_first;
    bool is_last;
};

// Destination of a panel's outputs, `columns` of them; bias: [columns] or null. Out: Bf16, or float for
// unrounded outputs.
template <typename Out>
struct PanelOutput {
    Out* out;
    int64_t stride;
    const Bf16* bias;
    int columns;
};

}  // namespace baton

// Both headers define
//   SLICE_PAIRS: maximum number of pairs in a slice
//   passes_over(rows): how many times the pairs of a slice are read for that many rows
//   multiply_rows<ROWS>(row, x, x_stride, slice, sums, output, prefetch): multiplies ROWS rows of x, from
//   `row` on, by a slice. A row is contiguous; rows are x_stride numbers apart.
#ifdef BATON_HAS_BF16_DOT
#include "gemm_bf16.h"
#else
#include "gemm_widened.h"
#endif

namespace baton {

template <typename Out>
inline void multiply_block(
    int rows, const Bf16* x, int64_t x_stride, const PanelSlice& weights, float* sums,
        const PanelOutput<Out>& output, WeightPrefetch prefetch) {
    int row = 0;
    for (; row + ROWS_PER_PASS <= rows; row += ROWS_PER_PASS) multiply_rows<ROWS_PER_PASS>(row, x, x_stride, weights,
        sums, output, prefetch);
    switch (rows - row) {
        case 5: return multiply_rows<5>(row, x, x_stride, weights, sums, output, prefetch);
        case 4: return multiply_rows<4>(row, x, x_stride, weights, sums, output, prefetch);
        case 3: return multiply_rows<3>(row, x, x_stride, weights, sums, output, prefetch);
        case 2: return multiply_rows<2>(row, x, x_stride, weights, sums, output, prefetch);
        case 1: return multiply_rows<1>(row, x, x_stride, weights, sums, output, prefetch);
        default: return;
    }
}

// Returns what to prefetch while a slice is multiplied. After the last slice of a panel, this thread most
// likely continues with the panel that is `threads` further on. A panel that is read only once or twice is
// limited by memory anyway, and the hardware prefetcher suffices.
inline WeightPrefetch prefetch_after(const PackedWeights& weights, int64_t panel, int64_t pair, int rows,
    bool is_last_block, int threads) {
    const int64_t pairs = weights.k / 2, slice = std::min<int64_t>(SLICE_PAIRS, pairs - pair);
    const bool is_last = pair + slice == pairs;
    const int passes = passes_over(rows);
    if (passes < 3 || (is_last && is_last_block && panel + threads >= weights.panels())) return {};
    const int64_t begin = is_last ? (panel + threads) % weights.panels() * pairs : panel * pairs + pair + slice;
    const int64_t length = std::min<int64_t>(SLICE_PAIRS, is_last ? pairs : pairs - pair - slice);
    const auto* at = reinterpret_cast<const char*>(weights.packed + begin * PANEL);
    const int64_t bytes = length * PANEL * int64_t(sizeof(uint32_t)),
        times = passes * ((slice + PREFETCH_EVERY_PAIRS - 1) / PREFETCH_EVERY_PAIRS);
    return {at, at + bytes, int((bytes / CACHE_LINE_BYTES + times - 1) / times)};
}

// Multiplies `count` rows of x, at most ROWS_PER_BLOCK, by one panel. x, out: of the first row.
template <typename Out>
inline void multiply_panel(const Bf16* x, const PackedWeights& weights, Out* out, int count, int64_t panel,
    bool is_last_block, int threads) {
    alignas(64) float sums[ROWS_PER_BLOCK * PANEL];
    const int64_t pairs = weights.k / 2, first = panel * PANEL;
    const int columns = int(std::min<int64_t>(PANEL, weights.n - first));
    const PanelOutput<Out> output{out + first, weights.n, weights.bias ? weights.bias + first : nullptr, columns};
    for (int64_t pair = 0; pair < pairs; pair += SLICE_PAIRS) {
        const int length = int(std::min<int64_t>(SLICE_PAIRS, pairs - pair));
        const PanelSlice slice{weights.packed + (panel * pairs + pair) * PANEL, length, pair == 0,
            pair + length == pairs};
        const WeightPrefetch prefetch = prefetch_after(weights, panel, pair, count, is_last_block, threads);
        multiply_block(count, x + 2 * pair, weights.k, slice, sums, output, prefetch);
    }
}

// out [rows, n] = x [rows, k] times the packed weights. All threads of the team call it.
template <typename In, typename Weights, typename Out>
void gemm(TeamThread& team, const In* x, const Weights& weights, Out* out, int64_t rows, int threads) {
    const int64_t panels = weights.panels(), blocks = (rows + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
    team.parallel_for(blocks * panels, [&](int64_t item) {
        const int64_t block = item / panels, begin = block * ROWS_PER_BLOCK;
        const int count = int(std::min<int64_t>(ROWS_PER_BLOCK, rows - begin));
        multiply_panel(x + begin * weights.k, weights, out + begin * weights.n, count, item % panels,
            block + 1 == blocks, threads);
    });
}

}  // namespace baton
