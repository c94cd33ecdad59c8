// Measures which product of bfloat16 is faster here: its dot product, or that of floats with the same bits.
//
// A dot product adds two products, so it is slower only where it takes more than twice as long as a product of floats.
// On an Intel Xeon (Emerald Rapids) torch's products of 512 rows took 1.5 times as long in bfloat16 as in float32.
#pragma once

#include <chrono>
#include <limits>

#include "gemm_bf16.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

// Rows times a slice of 64 outputs. The rows are the same six again and again. Numbers of the first are subnormal, and
// products of the second.
class Bf16Comparison {
  public:
    Bf16Comparison() {
        for (int i = 0; i < ROWS_PER_PASS * INPUTS; i++) {
            rows_[i] = next_number(i < INPUTS ? 0 : i < 2 * INPUTS ? 1 : WEIGHT_EXPONENT, i < INPUTS ? 0 : 15);
            floats_[i] = to_float(rows_[i]);
        }
        for (Bf16& weight : weights_) weight = next_number(WEIGHT_EXPONENT, 15);
    }

    // True if floats are faster for one pass and for many, by more than preparing the rows takes, and give the same
    // bits.
    bool prefers_floats() { return prefers_floats_for(1) && prefers_floats_for(MANY_PASSES); }

  private:
    static constexpr int INPUTS = Bf16Floats::SLICE, MANY_PASSES = 16, REPEATS = 20;
    static constexpr uint32_t WEIGHT_EXPONENT = 118;

    // Pseudo-random, of either sign, with exponents from `least` to `least + range`.
    Bf16 next_number(uint32_t least, uint32_t range) {
        state_ = state_ * 1664525u + 1013904223u;
        return {uint16_t((state_ >> 16 & 0x807fu) | (least + (state_ >> 8 & range)) << 7)};
    }

    bool prefers_floats_for(int passes) {
        const WeightFormat format{WEIGHT_BFLOAT16, 16, 1, 0, {}, {}, 0, {}};
        double dot_s = std::numeric_limits<double>::infinity(), floats_s = dot_s;
        for (int i = 0; i < REPEATS; i++) {
            dot_s = std::min(dot_s, seconds(Bf16Dot(format), Bf16Rows{rows_, INPUTS}, passes, dot_sums_));
            floats_s = std::min(floats_s,
                seconds(Bf16Floats(format), FloatRows{floats_, INPUTS}, passes, float_sums_));
        }
        return floats_s < 0.9 * dot_s && !std::memcmp(dot_sums_, float_sums_, sizeof dot_sums_);
    }

    template <typename Format>
    double seconds(const Format& format, const typename Format::Rows& x, int passes, float* sums) {
        const PanelSlice slice{reinterpret_cast<const uint8_t*>(weights_), sizeof weights_, 0, INPUTS, true};
        typename Format::Workspace workspace;
        const auto begin = std::chrono::steady_clock::now();
        format.open(slice, passes * ROWS_PER_PASS, workspace, [&](const auto& view) {
            for (int pass = 0; pass < passes; pass++) multiply_rows(view, x, 0, ROWS_PER_PASS, sums, {});
        });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    uint32_t state_ = 1;
    Bf16 rows_[ROWS_PER_PASS * INPUTS];
    float floats_[ROWS_PER_PASS * INPUTS];
    alignas(64) Bf16 weights_[INPUTS * PANEL];
    alignas(64) float dot_sums_[ROWS_PER_PASS * PANEL];
    alignas(64) float float_sums_[ROWS_PER_PASS * PANEL];
};

// Measured once per process. The answer does not change any bit of a result. Tests define BATON_PREFER_FLOATS, so that
// every processor with the dot product can test both.
inline bool prefers_floats() {
#ifdef BATON_PREFER_FLOATS
    return true;
#else
    static const bool answer = Bf16Comparison().prefers_floats();
    return answer;
#endif
}

}  // namespace baton

#endif
