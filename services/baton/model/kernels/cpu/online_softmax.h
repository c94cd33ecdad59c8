// One tile of attention: some query rows of one KV head against a stretch of one sequence's KV.
//
// A row is one query head of one token. Rows see [low, high) of the KV, each its own; what is not a number spreads within its sequence, to
// rows that do not see it, too. How a tile goes over its KV: attention_decode_bf16.h for bfloat16
// where the processor has a dot product of pairs, else attention_decode_float.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace baton {

constexpr int LANES = 16;  // floats of a vector of attention_decode_bf16.h; parts of a stretch of KV are multiples of it
constexpr int KV_TILE = 128;
constexpr int KV_STRETCH = 96;  // a tile's KV begins at a multiple of it, whatever a window hides: a row's sums have the same parts in any tile
constexpr int MAX_ROWS = 512;  // of any tile
constexpr int AHEAD = 2 * LANES;  // tokens between those that are read and those that are fetched
constexpr float NEVER = -1e30f;  // below every score; not infinite, so that differences stay numbers

inline int up(int value, int step) { return (value + step - 1) / step * step; }

// Where the KV of one sequence and head lies.
template <typename T>
struct KvRows {
    const T* base;
    const int32_t* table;
    int64_t block_stride, v_offset;
    int block_size, head_dim;

    const T* key(int index) const {
        return base + int64_t(table[index / block_size]) * block_stride + int64_t(index % block_size) * head_dim;
    }
    const T* value(int index) const { return key(index) + v_offset; }

    // Keys of [begin, end), one after the other, without a division for each.
    void keys(int begin, int end, const T** out) const {
        for (int block = begin / block_size, slot = begin % block_size; begin < end; block++, slot = 0) {
            const T* first = base + int64_t(table[block]) * block_stride;
            for (; slot < block_size && begin < end; slot++, begin++) *out++ = first + int64_t(slot) * head_dim;
        }
    }
};

struct Limits {
    int low, high;
};

// Running result of a tile's rows.
struct Running {
    std::vector<float> sums, most, total;  // [rows, head_dim], [rows], [rows]

    void start(int rows, int head_dim) {
        sums.assign(size_t(rows) * head_dim, 0.0f);
        most.assign(rows, NEVER);
        total.assign(rows, 0.0f);
    }
};

// A row of scores becomes weights exp2(score - most); sums and total follow the new most. Returns the factor for the old sums.
inline float soften(float* scores, int begin, int count, Limits seen, float factor, float& most, float& total) {
    float top = most;
    for (int i = 0; i < count; i++) {
        int index = begin + i;
        scores[i] = index >= seen.low && index < seen.high ? scores[i] * factor : NEVER;
        top = std::max(top, scores[i]);
    }
    float keep = std::exp2(most - top), sum = 0.0f;
    for (int i = 0; i < count; i++) {
        scores[i] = scores[i] <= NEVER ? 0.0f : exp2_near(scores[i] - top);
        sum += scores[i];
    }
    most = top;
    total = total * keep + sum;
    return keep;
}

}  // namespace baton
