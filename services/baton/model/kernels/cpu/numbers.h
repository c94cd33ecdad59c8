// Element types of weights, activations and KV, and conversions to and from float. bfloat16 and float16 are their 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

constexpr int LINE_BYTES = 64;  // of the processor's caches

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

inline float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) { return of_bits(uint32_t(value.bits) << 16); }

// float16 goes through integers: compilers have no common type for it, and loops of this are vectorized, which those of one are not. What is
// subnormal (below 2^-14) is the difference of two normal floats, so that flushing subnormals changes nothing.
constexpr uint32_t EXPONENT_STEP = 1u << 23;  // of a float; a half's exponents are 112 lower, its mantissa 13 bits shorter

inline float to_float(Fp16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, size = uint32_t(value.bits & 0x7fff) << 13;
    const uint32_t subnormal = bits_of(of_bits(size + 113 * EXPONENT_STEP) - of_bits(113 * EXPONENT_STEP));
    const uint32_t other = size + (size >= 31 * EXPONENT_STEP ? 224 : 112) * EXPONENT_STEP;
    return of_bits(sign | (size < EXPONENT_STEP ? subnormal : other));
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
    uint32_t bits = bits_of(value);
    if (value != value) return Bf16{uint16_t((bits >> 16) | 0x40)};
    bits += 0x7fff + ((bits >> 16) & 1);
    return Bf16{uint16_t(bits >> 16)};
}

// The same. Adding 0.5 to what will be subnormal leaves its half in the lowest bits, rounded.
template <>
inline Fp16 from_float<Fp16>(float value) {
    const uint32_t bits = bits_of(value), sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t subnormal = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (size - 112 * EXPONENT_STEP + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t beyond = size > 255 * EXPONENT_STEP ? 0x7e00 : 0x7c00;
    const uint32_t half = size < 113 * EXPONENT_STEP ? subnormal : size < 143 * EXPONENT_STEP ? normal : beyond;
    return Fp16{uint16_t(half | sign >> 16)};
}

// Added to it a small float becomes whole, and the sum's lowest bits are that number. NaN may not be converted to an integer; its bits may.
constexpr float TO_WHOLE = 3u << 22;

// 2^x for x in [-126, 127], beyond which it stays; relative error below 3e-7; NaN stays NaN. Without branches, so that loops of it are
// vectorized.
inline float exp2_near(float x) {
    x = x < -126.0f ? -126.0f : x > 127.0f ? 127.0f : x;
    const float shifted = x + TO_WHOLE, f = x - (shifted - TO_WHOLE);
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * of_bits((bits_of(shifted) - bits_of(TO_WHOLE) + 127) << 23);
}

constexpr float LOG2_E = 1.44269504f;

// A type code as Python hands it over; see library.py.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

}  // namespace baton
