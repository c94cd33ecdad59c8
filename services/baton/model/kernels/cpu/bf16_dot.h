// Detects the bfloat16 dot product (AVX512-BF16), loads pairs of bfloat16, and rounds as the dot product does.
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
    return number_at<uint32_t>(from);
}

#ifdef BATON_HAS_BF16_DOT

// Rounds as the dot product does, while it lives: subnormal numbers are zero, as operands and as results.
//
// The dot product of pairs adds the product of the upper halves, rounds, adds that of the lower halves, and rounds. A
// fused multiplication and addition rounds once, too, after the addition, so two of them give the same bits.
class DotRounding {
  public:
    DotRounding() : before_(_mm_getcsr()) {
        constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40;
        _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
        order();
    }
    ~DotRounding() {
        order();
        _mm_setcsr(before_);
    }
    DotRounding(const DotRounding&) = delete;
    DotRounding& operator=(const DotRounding&) = delete;

  private:
    // Compilers do not know that arithmetic depends on the register. They move no access to memory across this.
    static void order() { __asm__ volatile("" ::: "memory"); }

    unsigned before_;
};

#endif

}  // namespace baton
