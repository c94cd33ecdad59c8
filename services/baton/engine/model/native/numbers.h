// Element types of weights, activations and KV, and conversions to and from float. bfloat16 and float16 are their 16 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#endif

namespace baton {

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline float to_float(Fp16 value) {
    _Float16 half;
    std::memcpy(&half, &value.bits, 2);
    return float(half);
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

// To nearest, ties to even; NaN stays NaN.
template <>
inline Bf16 from_float<Bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return Bf16{uint16_t((bits >> 16) | 0x40)};
    bits += 0x7fff + ((bits >> 16) & 1);
    return Bf16{uint16_t(bits >> 16)};
}

template <>
inline Fp16 from_float<Fp16>(float value) {
    _Float16 half = _Float16(value);
    Fp16 out;
    std::memcpy(&out.bits, &half, 2);
    return out;
}

// 2^x for x in [-126, 127], beyond which it stays; relative error below 2e-7. Without branches, so that loops of it are vectorized.
inline float exp2_near(float x) {
    x = x < -126.0f ? -126.0f : x > 127.0f ? 127.0f : x;
    const float whole = std::floor(x + 0.5f), f = x - whole;
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const int32_t exponent = (int32_t(whole) + 127) << 23;
    float by;
    std::memcpy(&by, &exponent, 4);
    return p * by;
}

constexpr float LOG2_E = 1.44269504f;

// A type code as Python hands it over; see build.py.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

}  // namespace baton
