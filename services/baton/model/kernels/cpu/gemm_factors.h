// Part of gemm.h: expands the scales or offsets of a slice to floats.
#pragma once

#include "weight_format.h"

namespace baton {

template <typename Super>
inline void load_supers(const uint8_t* from, float* to) {
    Super supers[PANEL];
    std::memcpy(supers, from, sizeof supers);
    for (int lane = 0; lane < PANEL; lane++) to[lane] = to_float(supers[lane]);
}

// to [inputs / group_size, 64] = the factors of a slice's groups.
inline void expand_factors(const FactorFormat& format, const uint8_t* from, int inputs, int group_size, float* to) {
    const int super_size = std::min(format.super_size, CODED_SLICE), groups = int(divide_up(inputs, group_size));
    const uint8_t* codes = from + super_bytes(format, inputs);
    alignas(64) float supers[PANEL];
    for (int group = 0; group < groups; group++, to += PANEL) {
        if (group * group_size % super_size == 0) {
            const int super = group * group_size / super_size;
            if (format.super_dtype == FLOAT16) {
                load_supers<Fp16>(from + super * PANEL * 2, supers);
            } else {
                load_supers<float>(from + super * PANEL * 4, supers);
            }
        }
        const uint8_t* code = codes + group * PANEL;
        switch (format.codes) {
            case NO_CODES:
                for (int lane = 0; lane < PANEL; lane++) to[lane] = supers[lane];
                break;
            case INT8_CODES:
                for (int lane = 0; lane < PANEL; lane++) to[lane] = supers[lane] * float(int8_t(code[lane]));
                break;
            default:
                for (int lane = 0; lane < PANEL; lane++) to[lane] = supers[lane] * float(code[lane]);
        }
    }
}

}  // namespace baton
