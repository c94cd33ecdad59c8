// Pairs of bfloat16, and whether this processor multiplies them and adds them to floats (AVX512-BF16).
#pragma once

#include <cstring>

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define BATON_PAIRS
#include <immintrin.h>
#endif

namespace baton {

// Two numbers as a word. Not through a pointer to words: what was written as bfloat16 is no word to C++, unless -fno-strict-aliasing says
// so, with which g++ 12 no longer vectorizes half of the loops of attention_prefill_float.h.
inline uint32_t pair_at(const Bf16* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

}  // namespace baton
