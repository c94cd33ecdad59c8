// Float vectors of the processor's width. They use the compiler's vector extension, not intrinsics, so the
// same code serves AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace baton {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, NUM_REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32, NUM_REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 16;
#endif
constexpr int VECTOR_FLOATS = VECTOR_BYTES / 4;

using FloatVec = float __attribute__((vector_size(VECTOR_BYTES)));
using WordVec = uint32_t __attribute__((vector_size(VECTOR_BYTES)));

// Unaligned load of one vector. An array of vectors copied with one memcpy would stay in memory instead of
// registers.
template <typename Vector, typename Number>
inline Vector load_vector(const Number* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// The same address, unknown to the compiler: g++ 12 then loads what is there again instead of keeping it in a register
// over a loop. Not volatile: loads that are next to each other may still be joined.
template <typename T>
inline const T* load_again(const T* from) {
    asm("" : "+r"(from));
    return from;
}

// One vector of float16 numbers as floats.
inline FloatVec load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return FloatVec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__) && defined(__F16C__)
    return FloatVec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Fp16 halves[VECTOR_FLOATS];
    std::memcpy(halves, from, sizeof halves);
    FloatVec floats{};
    for (int i = 0; i < VECTOR_FLOATS; i++) floats[i] = to_float(halves[i]);
    return floats;
#endif
}

inline void store(float* to, FloatVec vector) { std::memcpy(to, &vector, sizeof vector); }

}  // namespace baton
