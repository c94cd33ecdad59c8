// One tile of attention: some query rows of one KV head against a range of one sequence's KV.
//
// A row is one query head of one token. Each row sees its own KvRange. NaN in the KV spreads within its
// sequence, also to rows that do not see it. attention_decode_bf16.h computes tiles in bfloat16 if the
// processor has its dot product, attention_decode_float.h all others.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_kv.h"

namespace baton {

// Floats per vector of attention_decode_bf16.h.
constexpr int BF16_LANES = 16;
constexpr int KV_TILE = 128;
// A tile's KV begins at a multiple of this, even with a window. So a row's sums do not depend on its tile.
constexpr int KV_BATCH = 96;
constexpr int MAX_ROWS = 512;  // upper bound for any tile
// The KV that a row sees is summed in segments, whose sums are then added in order. Where a segment begins depends
// on nothing but the number of visible tokens. So a row's result depends neither on its tile nor on how many threads
// share its KV.
constexpr int MIN_SEGMENT_TOKENS = 768;
constexpr int MAX_SEGMENTS = 8;  // in which all visible tokens fit, if the first begins one
static_assert(MIN_SEGMENT_TOKENS % KV_BATCH == 0 && MIN_SEGMENT_TOKENS % KV_TILE == 0);
// Distance between the tokens being read and being prefetched.
constexpr int PREFETCH_TOKENS = 2 * BF16_LANES;
constexpr float MASKED_SCORE = -1e30f;  // below every score; finite, so that differences are not NaN

inline int round_up(int value, int step) { return (value + step - 1) / step * step; }

// The first multiple of `step` after `value`.
inline int next_multiple(int value, int step) { return (value / step + 1) * step; }

// Tokens of a segment for a row that sees `num_visible` tokens. Segments begin at multiples of it.
inline int segment_tokens(int num_visible) {
    int tokens = MIN_SEGMENT_TOKENS;
    while (num_visible > MAX_SEGMENTS * tokens) tokens *= 2;
    return tokens;
}

// Locates the KV of one sequence and head in its blocks. T: as it is stored; int8_t has scales. `first`: the
// first token that may be read.
template <typename T>
struct KvRows {
    static constexpr bool HAS_SCALES = std::is_same_v<T, int8_t>;

    const T* base;
    const int32_t* table;
    int64_t block_stride, v_offset;  // in elements
    int block_size, head_dim, first;
    const Bf16* scales = nullptr;  // of the head's keys in block 0
    int64_t scale_block_stride = 0, v_scale_offset = 0;

    KvRows(const LayerKv& kv, const KvStrides& strides, int kv_head, const int32_t* table, int block_size,
        int head_dim, int first)
        : base(add_bytes(static_cast<const T*>(kv.keys), kv_head * strides.head)), table(table),
          block_stride(strides.block / int64_t(sizeof(T))),
          v_offset(static_cast<const T*>(kv.values) - static_cast<const T*>(kv.keys)), block_size(block_size),
          head_dim(head_dim), first(first) {
        if constexpr (HAS_SCALES) {
            scales = add_bytes(static_cast<const Bf16*>(kv.key_scales), kv_head * strides.scale_head);
            scale_block_stride = strides.block / int64_t(sizeof(Bf16));
            v_scale_offset = kv.value_scales - kv.key_scales;
        }
    }

    // Writes the scales of the keys and values of [begin, end), without a division per token. Tokens before
    // `first` get 0. Meanwhile it prefetches the scales of as many tokens after them, up to `last`.
    void token_scales(int begin, int end, int last, float* key_scales, float* value_scales) const {
        const int from = std::clamp(first, begin, end);
        std::fill(key_scales, key_scales + (from - begin), 0.0f);
        std::fill(value_scales, value_scales + (from - begin), 0.0f);
        for (int block = from / block_size, slot = from % block_size, i = from; i < end; block++, slot = 0) {
            const Bf16* keys = scales + int64_t(table[block]) * scale_block_stride;
            for (; slot < block_size && i < end; slot++, i++) {
                key_scales[i - begin] = to_float(keys[slot]);
                value_scales[i - begin] = to_float(keys[v_scale_offset + slot]);
            }
        }
        const int ahead = std::min(end + (end - begin), last);
        for (int block = std::max(end, first) / block_size; block * block_size < ahead; block++) {
            const Bf16* keys = scales + int64_t(table[block]) * scale_block_stride;
            __builtin_prefetch(keys);
            __builtin_prefetch(keys + v_scale_offset);
        }
    }

    const T* key(int index) const {
        return base + int64_t(table[index / block_size]) * block_stride + int64_t(index % block_size) * head_dim;
    }
    const T* value(int index) const { return key(index) + v_offset; }

    // Writes the addresses of the keys of [begin, end) to `out`, without a division per key. begin: not before
    // `first`.
    void keys(int begin, int end, const T** out) const {
        for (int block = begin / block_size, slot = begin % block_size; begin < end; block++, slot = 0) {
            const T* first = base + int64_t(table[block]) * block_stride;
            for (; slot < block_size && begin < end; slot++, begin++) *out++ = first + int64_t(slot) * head_dim;
        }
    }
};

struct KvRange {
    int begin, end;
};

// State of the online softmax for the rows of a tile, over a part of the KV.
struct SoftmaxState {
    std::vector<float> weighted_values, row_max, row_sum;  // [rows, head_dim], [rows], [rows]

    void start(int rows, int head_dim) {
        weighted_values.assign(size_t(rows) * head_dim, 0.0f);
        row_max.assign(rows, MASKED_SCORE);
        row_sum.assign(rows, 0.0f);
    }

    // Adds the state of the same rows over later tokens. It is not inlined, so that its rounding is the same wherever
    // it is called: a compiler may join either of two products with their sum.
    __attribute__((noinline)) void add(const SoftmaxState& later) {
        const size_t rows = row_max.size(), dim = weighted_values.size() / rows;
        for (size_t r = 0; r < rows; r++) {
            const float top = std::max(row_max[r], later.row_max[r]);
            const float own_factor = std::exp2(row_max[r] - top), factor = std::exp2(later.row_max[r] - top);
            row_max[r] = top;
            row_sum[r] = row_sum[r] * own_factor + later.row_sum[r] * factor;
            float* own = &weighted_values[r * dim];
            const float* added = &later.weighted_values[r * dim];
            for (size_t d = 0; d < dim; d++) own[d] = own[d] * own_factor + added[d] * factor;
        }
    }
};

// Turns a row of scores into weights exp2(score - row_max) and updates row_max and row_sum. Returns the
// factor by which earlier weighted values must be multiplied.
inline float online_softmax_update(float* scores, int begin, int count, KvRange visible, float factor,
    float& row_max, float& row_sum) {
    float new_max = row_max;
    for (int i = 0; i < count; i++) {
        int index = begin + i;
        scores[i] = index >= visible.begin && index < visible.end ? scores[i] * factor : MASKED_SCORE;
        new_max = std::max(new_max, scores[i]);
    }
    float rescale = std::exp2(row_max - new_max), sum = 0.0f;
    for (int i = 0; i < count; i++) {
        scores[i] = scores[i] <= MASKED_SCORE ? 0.0f : fast_exp2(scores[i] - new_max);
        sum += scores[i];
    }
    row_max = new_max;
    row_sum = row_sum * rescale + sum;
    return rescale;
}

}  // namespace baton
