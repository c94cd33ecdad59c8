// Multiplies x [rows, k] times packed weights [n, k] transposed, accumulated in float: the loop over blocks of
// rows, panels and slices that all weight formats share.
//
// Up to six rows of x are multiplied by a slice at a time. Meanwhile weights that are read next are prefetched,
// see prefetch_during. Between slices the sums of a block are kept in memory.
//
// A format is a class (gemm_bf16.h, gemm_widened.h, gemm_coded.h), made from a WeightFormat, with
//   slice_inputs(): inputs that are multiplied at a time: a packed slice, or an even divisor of it if the format has
//     no factors
//   Rows: the rows of x as it needs them, see gemm_rows.h
//   Workspace: memory of a thread
//   passes(rows): how many times a slice is read for that many rows
//   fetches(inputs): calls of WeightPrefetch::fetch in one pass
//   open(slice, rows, workspace, body): calls body with a view of the slice, which has
//     multiply<ROWS>(x, row, sums, prefetch): sums [ROWS, 64] += rows `row`.. of x times the slice. The sums of a
//     first slice are undefined before.
//     ROWS_PER_TILE: rows that multiply_tile, of the same arguments, takes at a time if uses_tiles; 0 without it
#pragma once

#include <algorithm>

#include "parallel_for.h"
#include "weight_format.h"

namespace baton {

constexpr int ROWS_PER_PASS = 6;

// Prefetches the next weights into the L2 cache, a few cache lines per call.
struct WeightPrefetch {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;
    int lines = 0;

    void fetch() {
        for (int i = 0; i < lines && at < end; i++, at += CACHE_LINE_BYTES) __builtin_prefetch(at, 0, 2);
    }
};

// A slice of a panel: `inputs` inputs from first_input on, `bytes` long.
struct PanelSlice {
    const uint8_t* packed;
    int64_t bytes;
    int64_t first_input;
    int inputs;
    bool is_first;
};

// What a thread multiplies at a time: rows [row, row + count) by the panel at `packed`, whose first output is
// `first`. next: the slice that it most likely continues with, null if nothing.
struct PanelItem {
    const PackedWeights& weights;
    const uint8_t* packed;
    int64_t first;
    int64_t row;
    int count;
    const uint8_t* next;
    int64_t next_bytes;
};

// Distance of the weights that are prefetched while a slice is read once. Such a product is limited by memory, and
// the hardware prefetches too little. Tuned on one Intel Xeon, among 1, 2, 4 and 8 KiB.
constexpr int64_t STREAM_AHEAD_BYTES = 4096;

// Returns what to prefetch while a slice is multiplied: if it is read more than once, the next slice, else what is
// a fixed distance ahead.
// length: inputs of a slice that is not the last.
inline WeightPrefetch prefetch_during(const PanelItem& item, const PanelSlice& slice, int length, int passes,
    int fetches) {
    const auto lines = [&](int64_t bytes) {
        return int(divide_up(bytes / CACHE_LINE_BYTES, int64_t(passes) * std::max(1, fetches)));
    };
    if (passes < 2) {
        const uint8_t* ahead = slice.packed + STREAM_AHEAD_BYTES;
        return {ahead, ahead + slice.bytes, lines(slice.bytes)};
    }
    const int64_t left = item.weights.k - slice.first_input - slice.inputs;
    const uint8_t* at = left ? slice.packed + slice.bytes : item.next;
    if (!at) return {};
    const int64_t bytes = left ? slice_bytes(item.weights.format, int(std::min<int64_t>(left, slice.inputs)))
                               : std::min(item.next_bytes, slice_bytes(item.weights.format,
                                     int(std::min<int64_t>(item.weights.k, length))));
    return {at, at + bytes, lines(bytes)};
}

template <typename View, typename Rows>
inline void multiply_rows(const View& view, const Rows& x, int64_t row, int count, float* sums,
    WeightPrefetch prefetch) {
    const int64_t end = row + count;
    if constexpr (View::ROWS_PER_TILE != 0) {
        for (; view.uses_tiles && row + View::ROWS_PER_TILE <= end; row += View::ROWS_PER_TILE) {
            view.multiply_tile(x, row, sums, prefetch);
            sums += View::ROWS_PER_TILE * PANEL;
        }
    }
    for (; row + ROWS_PER_PASS <= end; row += ROWS_PER_PASS, sums += ROWS_PER_PASS * PANEL)
        view.template multiply<ROWS_PER_PASS>(x, row, sums, prefetch);
    switch (end - row) {
        case 5: return view.template multiply<5>(x, row, sums, prefetch);
        case 4: return view.template multiply<4>(x, row, sums, prefetch);
        case 3: return view.template multiply<3>(x, row, sums, prefetch);
        case 2: return view.template multiply<2>(x, row, sums, prefetch);
        case 1: return view.template multiply<1>(x, row, sums, prefetch);
        default: return;
    }
}

// sums [count, 64]: the products of the item's rows with its panel.
template <typename Format>
void multiply_panel(const Format& format, const typename Format::Rows& x, const PanelItem& item, float* sums) {
    const PackedWeights& weights = item.weights;
    typename Format::Workspace workspace;
    const uint8_t* packed = item.packed;
    const int length = format.slice_inputs(), passes = format.passes(item.count);
    for (int64_t input = 0; input < weights.k; input += length) {
        const int inputs = int(std::min<int64_t>(length, weights.k - input));
        const PanelSlice slice{packed, slice_bytes(weights.format, inputs), input, inputs, input == 0};
        const WeightPrefetch prefetch = prefetch_during(item, slice, length, passes, format.fetches(inputs));
        format.open(slice, item.count, workspace, [&](const auto& view) {
            multiply_rows(view, x, item.row, item.count, sums, prefetch);
        });
        packed += slice.bytes;
    }
}

// to [columns] = sums plus bias, which may be null.
template <typename Out>
inline void write_row(const float* sums, const float* bias, int columns, Out* to) {
    if (bias) {
        for (int i = 0; i < columns; i++) to[i] = from_float<Out>(sums[i] + bias[i]);
    } else {
        for (int i = 0; i < columns; i++) to[i] = from_float<Out>(sums[i]);
    }
}

#ifdef BATON_HAS_BF16_DOT
// The same with the instruction that rounds. It would round subnormal numbers to zero, so rows with such are
// written as above.
inline void write_row(const float* sums, const float* bias, int columns, Bf16* to) {
    constexpr int LENGTH = 16, SUBNORMAL = 0x20;
    uint32_t num_subnormal = 0;
    for (int i = 0; i < columns; i += LENGTH) {
        const auto lanes = __mmask16((1u << std::min(LENGTH, columns - i)) - 1);
        __m512 values = _mm512_maskz_loadu_ps(lanes, sums + i);
        if (bias) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(lanes, bias + i));
        num_subnormal |= _mm512_fpclass_ps_mask(values, SUBNORMAL);
        _mm256_mask_storeu_epi16(to + i, lanes, __m256i(_mm512_cvtneps_pbh(values)));
    }
    if (num_subnormal) write_row<Bf16>(sums, bias, columns, to);
}
#endif

// Writes the outputs of an item: out [rows, stride] from the first output of its weights on.
template <typename Out>
inline void write_outputs(const PanelItem& item, const float* sums, Out* out, int64_t stride) {
    const int columns = int(std::min<int64_t>(PANEL, item.weights.n - item.first));
    const float* bias = item.weights.bias ? item.weights.bias + item.first : nullptr;
    for (int r = 0; r < item.count; r++)
        write_row(sums + r * PANEL, bias, columns, out + (item.row + r) * stride + item.first);
}

}  // namespace baton
