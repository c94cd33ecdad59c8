// Part of gemm.h: the rows of x as the formats need them, prepared once per product in the caller's scratch.
// of(address, k, group_size): the rows at that address, for weights with one factor per group_size inputs.
#pragma once

#include <cmath>

#include "weight_format.h"

namespace baton {

struct Bf16Rows {
    const Bf16* values;
    int64_t stride;

    static Bf16Rows of(const void* values, int64_t k, int) { return {static_cast<const Bf16*>(values), k}; }
};

// Not a power of two apart: rows would evict each other from the L1 cache.
inline int64_t float_row_stride(int64_t k) { return divide_up(k, 16) * 16 + 16; }

struct FloatRows {
    const float* values;
    int64_t stride;

    static FloatRows of(const void* values, int64_t k, int) {
        return {static_cast<const float*>(values), float_row_stride(k)};
    }
};

// Where a group of inputs lies in each record of QuantisedRows, in bytes.
struct GroupPlace {
    int64_t codes;
    int64_t scale;
    int64_t start;
    int64_t sum;
};

// A row as 8-bit integers, per group of inputs with a scale. One record per row: `codes` [k], then per group the
// scale, `start` and the sum of its numbers. A group's start is what its integer dot product with the weights
// begins with: `shift` times the sum of its codes, because weight codes are stored without a sign.
struct QuantisedRows {
    const uint8_t* records;
    int64_t record_bytes;
    int64_t codes_bytes;
    int64_t groups;

    static QuantisedRows of(const void* records, int64_t k, int group_size) {
        const int64_t codes = divide_up(k, CACHE_LINE_BYTES) * CACHE_LINE_BYTES, groups = divide_up(k, group_size);
        const int64_t bytes = divide_up(codes + 12 * groups, CACHE_LINE_BYTES) * CACHE_LINE_BYTES;
        return {static_cast<const uint8_t*>(records), bytes, codes, groups};
    }

    const uint8_t* record(int64_t row) const { return records + row * record_bytes; }

    GroupPlace place(int64_t group, int group_size) const {
        const int64_t scale = codes_bytes + group * 4;
        return {group * group_size, scale, scale + groups * 4, scale + groups * 8};
    }
};

template <typename T>
inline void widen_row(const T* x, int64_t k, float* to) {
    for (int64_t i = 0; i < k; i++) to[i] = to_float(x[i]);
}

// Groups whose largest number is smaller are zero: the inverse of their scale would not be finite.
constexpr float MIN_GROUP_MAX = 1e-30f;

// Rounds a row to integers in [-127, 127] times a scale per group. The scale of a group that is not finite is
// NaN, so all outputs of the row become NaN.
template <typename T>
void quantise_row(const T* x, int64_t row, int group_size, int shift, const QuantisedRows& rows) {
    auto* record = const_cast<uint8_t*>(rows.record(row));
    const GroupPlace first = rows.place(0, group_size);
    auto* codes = reinterpret_cast<int8_t*>(record + first.codes);
    auto* scales = reinterpret_cast<float*>(record + first.scale);
    auto* starts = reinterpret_cast<int32_t*>(record + first.start);
    auto* sums = reinterpret_cast<float*>(record + first.sum);
    for (int64_t group = 0; group < rows.groups; group++, x += group_size, codes += group_size) {
        float largest = 0.0f, nan_or_zero = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : nan_or_zero)
        for (int i = 0; i < group_size; i++) {
            const float value = to_float(x[i]), size = std::fabs(value);
            largest = size > largest ? size : largest;
            nan_or_zero += value * 0.0f;
        }
        const bool is_number = largest > MIN_GROUP_MAX && largest < INFINITY;
        const float inverse = is_number ? 127.0f / largest : 0.0f, scale = largest / 127.0f + nan_or_zero;
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < group_size; i++) {
            const uint32_t rounded = bits_from_float(to_float(x[i]) * inverse + ROUNDING_SHIFT);
            codes[i] = int8_t(rounded - bits_from_float(ROUNDING_SHIFT));
            sum += codes[i];
        }
        scales[group] = scale;
        starts[group] = shift * sum;
        sums[group] = scale * float(sum);
    }
}

}  // namespace baton
