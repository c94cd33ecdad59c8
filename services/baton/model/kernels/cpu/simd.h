// Vectors of floats as long as those of this processor: the compiler's, not intrinsics, so AVX2, AVX-512 and NEON alike.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

#if defined(__AVX512F__)
constexpr int LANE_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANE_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANE_BYTES = 16, REGISTERS = 32;
#else
constexpr int LANE_BYTES = 16, REGISTERS = 16;
#endif
constexpr int LANE_FLOATS = LANE_BYTES / 4;

using Floats = float __attribute__((vector_size(LANE_BYTES)));
using Words = uint32_t __attribute__((vector_size(LANE_BYTES)));

// Wherever it lies. One vector at a time: an array of them that is copied whole stays in memory.
template <typename Vector, typename Number>
inline Vector vector_at(const Number* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }

}  // namespace baton
