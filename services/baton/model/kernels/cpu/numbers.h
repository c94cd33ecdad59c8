// Element types of weights, activations and KV, and their conversion to and from float. bfloat16 and float16
// are stored as their 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

constexpr int CACHE_LINE_BYTES = 64;  // of all supported processors

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

// Reads a number that may be unaligned, or was written as another type.
template <typename T>
inline T number_at(const void* from) {
    T number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

inline float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_from_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return float(value); }

inline float to_float(Bf16 value) { return float_from_bits(uint32_t(value.bits) << 16); }

// One step of a float's exponent. A float16's exponents are 112 lower and its mantissa is 13 bits shorter.
constexpr uint32_t EXPONENT_ONE = 1u << 23;

// float16 is converted with integer arithmetic: compilers share no float16 type, and this form is vectorised,
// unlike loops over the compilers' types. Subnormals (below 2^-14) are the difference of two normal floats, so
// flushing subnormals to zero changes nothing.
inline float to_float(Fp16 value) {
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16, size = uint32_t(value.bits & 0x7fff) << 13;
    const uint32_t subnormal
        = bits_from_float(float_from_bits(size + 113 * EXPONENT_ONE) - float_from_bits(113 * EXPONENT_ONE));
    const uint32_t other = size + (size >= 31 * EXPONENT_ONE ? 224 : 112) * EXPONENT_ONE;
    return float_from_bits(sign | (size < EXPONENT_ONE ? subnormal : other));
}

// A float8 of 4 exponent and 3 mantissa bits (e4m3fn): no infinity, and one NaN of each sign.
struct Float8Bits {
    uint8_t bits;
};

// As for float16. The exponents are 120 lower and the mantissa is 20 bits shorter.
inline float to_float(Float8Bits value) {
    const uint32_t sign = uint32_t(value.bits & 0x80) << 24, size = uint32_t(value.bits & 0x7f) << 20;
    const uint32_t subnormal
        = bits_from_float(float_from_bits(size + 121 * EXPONENT_ONE) - float_from_bits(121 * EXPONENT_ONE));
    const uint32_t normal = size == 0x7f00000u ? 0x7fc00000u : size + 120 * EXPONENT_ONE;
    return float_from_bits(sign | (size < EXPONENT_ONE ? subnormal : normal));
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
    return value;
}

// Rounds to nearest, ties to even. NaN stays NaN.
template <>
inline Bf16 from_float<Bf16>(float value) {
    uint32_t bits = bits_from_float(value);
    if (value != value) return Bf16{uint16_t((bits >> 16) | 0x40)};
    bits += 0x7fff + ((bits >> 16) & 1);
    return Bf16{uint16_t(bits >> 16)};
}

// Rounds to nearest, ties to even. For a subnormal result, adding 0.5 leaves the rounded value in the lowest
// bits.
template <>
inline Fp16 from_float<Fp16>(float value) {
    const uint32_t bits = bits_from_float(value), sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t subnormal = bits_from_float(float_from_bits(size) + 0.5f) - bits_from_float(0.5f);
    const uint32_t normal = (size - 112 * EXPONENT_ONE + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t beyond = size > 255 * EXPONENT_ONE ? 0x7e00 : 0x7c00;
    const uint32_t half = size < 113 * EXPONENT_ONE ? subnormal : size < 143 * EXPONENT_ONE ? normal : beyond;
    return Fp16{uint16_t(half | sign >> 16)};
}

// Adding this constant to a small float rounds it to an integer, which the lowest bits of the sum then hold.
// This also works for NaN, which must not be converted to an integer.
constexpr float ROUNDING_SHIFT = 3u << 22;

// 2^x, with x clamped to [-126, 127]. Relative error below 3e-7; NaN stays NaN. Without branches, so that
// loops over it are vectorised.
inline float fast_exp2(float x) {
    x = x < -126.0f ? -126.0f : x > 127.0f ? 127.0f : x;
    const float shifted = x + ROUNDING_SHIFT, f = x - (shifted - ROUNDING_SHIFT);
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return p * float_from_bits((bits_from_float(shifted) - bits_from_float(ROUNDING_SHIFT) + 127) << 23);
}

constexpr float LOG2_E = 1.44269504f;

// Dtype code passed from Python, see kernel_library.py.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Calls body with a number of that dtype, which serves as its type.
template <typename Body>
void dispatch_dtype(int32_t dtype, const Body& body) {
    switch (dtype) {
        case FLOAT32: return body(float{});
        case BFLOAT16: return body(Bf16{});
        default: return body(Fp16{});
    }
}

}  // namespace baton
