// Whether this processor multiplies pairs of bfloat16 and adds them to floats (AVX512-BF16).
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define BATON_PAIRS
#include <immintrin.h>
#endif
