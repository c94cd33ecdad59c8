// Detects the bfloat16 dot product (AVX512-BF16) and loads pairs of bfloat16.
#pragma once

#include <cstring>

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define BATON_HAS_BF16_DOT
#include <immintrin.h>
#endif

namespace baton {

// Two consecutive numbers as one 32-bit word. It uses memcpy because reading bfloat16 through a word pointer
// breaks the aliasing rules. With -fno-strict-aliasing, g++ 12 no longer vectorises half of the loops of
// attention_prefill_float.h.
inline uint32_t load_bf16_pair(const Bf16* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

}  // namespace baton
