// Part of gemm.h: expands the scales or offsets of a slice to floats.
#pragma once

#include "simd.h"
#include "weight_format.h"

namespace baton {

inline void load_supers(int32_t dtype, const uint8_t* from, float* to) {
    for (int lane = 0; lane < PANEL; lane += VECTOR_FLOATS)
        store(to + lane, dtype == FLOAT16 ? load_halves(from + 2 * lane) : load_vector<FloatVec>(from + 4 * lane));
}

template <typename Code>
inline void multiply_supers(const float* supers, const uint8_t* codes, float* to) {
    for (int lane = 0; lane < PANEL; lane++) to[lane] = supers[lane] * float(Code(codes[lane]));
}

// to [inputs / group_size, 64] = the factors of a slice's groups.
inline void expand_factors(const FactorFormat& format, const uint8_t* from, int inputs, int group_size, float* to) {
    const int super_size = std::min(format.super_size, CODED_SLICE), groups = int(divide_up(inputs, group_size));
    const uint8_t* codes = from + super_bytes(format, inputs);
    const int bytes = PANEL * (format.super_dtype == FLOAT16 ? 2 : 4);
    alignas(64) float supers[PANEL];
    for (int group = 0; group < groups; group++, to += PANEL, codes += PANEL) {
        const bool begins_super = group * group_size % super_size == 0;
        if (begins_super) load_supers(format.super_dtype, from, format.codes == NO_CODES ? to : supers);
        if (begins_super) from += bytes;
        if (format.codes == INT8_CODES) multiply_supers<int8_t>(supers, codes, to);
        if (format.codes == UINT8_CODES) multiply_supers<uint8_t>(supers, codes, to);
    }
}

}  // namespace baton
