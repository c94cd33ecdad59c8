// Formats of packed weights: how a linear layer's weights lie in memory.
//
// Weights [n, k] are packed once into panels of 64 outputs. A panel is a row of slices along k, one after the
// other, each as long as slice_inputs() says. Within a slice a SIMD lane is an output, so no sum crosses lanes:
//
//   float32, float16   [inputs][64] numbers
//   bfloat16           [inputs / 2][64] words of two inputs
//   float8 (e4m3fn)    [inputs / 4][64] words of four inputs, then scales
//   8-bit codes        [inputs / 4][64] words of four inputs (a quad), then scales, then offsets
//   4-bit codes        [inputs / 8][64] words of two quads: byte j has input j of the first in its lower half
//   5-bit codes        as 4 bits, then [inputs / 32][64] words: bit q of byte j is the highest of input 4 q + j
//   6-bit codes        as 4 bits, then [inputs / 16][64] words: bits 2 q and 2 q + 1 of byte j are the highest
//
// Factors (scales, offsets) of a slice are supers [supers][64] and, with two levels, codes [groups][64]. A
// factor is code times super, or the super alone.
#pragma once

#include <algorithm>

#include "bf16_dot.h"
#include "numbers.h"

namespace baton {

constexpr int PANEL = 64;

// One more than the Dtype codes of numbers.h, see weight_packing.py.
enum WeightKind : int32_t { WEIGHT_FLOAT32 = 0, WEIGHT_BFLOAT16 = 1, WEIGHT_FLOAT16 = 2, WEIGHT_FLOAT8 = 3, CODED = 4 };

enum FactorCodes : int32_t { NO_CODES = 0, INT8_CODES = 1, UINT8_CODES = 2 };

// super_size: inputs per super, a divisor or a multiple of the slice; 0 if there are no such factors.
struct FactorFormat {
    int32_t super_size;
    int32_t super_dtype;  // FLOAT32 or FLOAT16
    int32_t codes;        // FactorCodes
};

// Value of a weight: scale * (code - zero_point) + offset; with a table, table[code] in place of the code.
struct WeightFormat {
    int32_t kind;
    int32_t bits;        // of codes: 4, 5, 6 or 8
    int32_t group_size;  // inputs per factor
    int32_t zero_point;
    FactorFormat scales;
    FactorFormat offsets;
    int32_t has_table;   // only with 4 bits
    uint8_t table[16];   // at most MAX_TABLE_VALUE each
};

constexpr int MAX_TABLE_VALUE = 31;
constexpr int CODED_SLICE = 256;  // also the longest super of GGUF; 64 outputs as bytes fit into the L1 cache
constexpr int UNIT = 16;          // inputs whose codes are unpacked together
constexpr int MAX_GROUPS = CODED_SLICE / UNIT;

#ifdef BATON_HAS_BF16_DOT
constexpr int BF16_SLICE = 2048;
#else
constexpr int BF16_SLICE = 1024;  // six rows of a slice, as floats, fit into the L1 cache
#endif

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int slice_inputs(const WeightFormat& format) {
    switch (format.kind) {
        case WEIGHT_FLOAT32: return 512;
        case WEIGHT_FLOAT16: return 1024;
        case WEIGHT_BFLOAT16: return BF16_SLICE;
        default: return CODED_SLICE;
    }
}

inline int supers_in(const FactorFormat& format, int inputs) {
    return format.super_size ? int(divide_up(inputs, std::min(format.super_size, CODED_SLICE))) : 0;
}

inline int64_t super_bytes(const FactorFormat& format, int inputs) {
    return int64_t(supers_in(format, inputs)) * PANEL * (format.super_dtype == FLOAT16 ? 2 : 4);
}

inline int64_t factor_bytes(const FactorFormat& format, int inputs, int group_size) {
    return super_bytes(format, inputs) + (format.codes == NO_CODES ? 0 : inputs / group_size * PANEL);
}

// Words of the two planes of codes of a slice. The lower plane has all bits of 8-bit codes.
inline int64_t low_words(int bits, int inputs) { return divide_up(inputs, bits == 8 ? 4 : 8) * PANEL; }
inline int64_t high_words(int bits, int inputs) {
    return bits == 5 ? divide_up(inputs, 32) * PANEL : bits == 6 ? divide_up(inputs, 16) * PANEL : 0;
}

inline int64_t slice_bytes(const WeightFormat& format, int inputs) {
    switch (format.kind) {
        case WEIGHT_FLOAT32: return int64_t(inputs) * PANEL * 4;
        case WEIGHT_FLOAT16: return int64_t(inputs) * PANEL * 2;
        case WEIGHT_BFLOAT16: return divide_up(inputs, 2) * PANEL * 4;
        case WEIGHT_FLOAT8: return divide_up(inputs, 4) * PANEL * 4 + factor_bytes(format.scales, inputs, 1);
        default: return 4 * (low_words(format.bits, inputs) + high_words(format.bits, inputs))
            + factor_bytes(format.scales, inputs, format.group_size)
            + factor_bytes(format.offsets, inputs, format.group_size);
    }
}

inline int64_t panel_bytes(const WeightFormat& format, int64_t k) {
    const int slice = slice_inputs(format), rest = int(k % slice);
    return k / slice * slice_bytes(format, slice) + (rest ? slice_bytes(format, rest) : 0);
}

// The packed weights of one linear layer. bias: float [n] or null. order: null, or [k]; input i of the weights is
// element order[i] of a row of x. Only codes can have one.
struct PackedWeights {
    const uint8_t* packed;
    const float* bias;
    const int32_t* order;
    int64_t n;
    int64_t k;
    WeightFormat format;

    int64_t panels() const { return divide_up(n, PANEL); }
    const uint8_t* panel_at(int64_t panel) const { return packed + panel * panel_bytes(format, k); }
};

}  // namespace baton
