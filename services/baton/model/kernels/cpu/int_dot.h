// Dot products of unsigned codes with signed bytes, four inputs at a time, in 32-bit lanes.
//
// With AVX512-VNNI or AVX-VNNI it is one instruction (dpbusd). AVX2 adds products in pairs to 16 bits first
// (maddubs), and these saturate:
//   at most 31 (4 and 5 bits): four quads of pairs fit, 4 * 2 * 31 * 127 = 31,496 < 32,768
//   at most 63 (6 bits): two quads fit, 32,004
//   8 bits: not even one does, 2 * 255 * 127 = 64,770. Codes minus 128 fit, if their sign moves to the activation:
//   2 * 128 * 127 = 32,512. The sum of the activations times 128 is then part of the start of the sum, see
//   code_bias().
// ARM's dot product (sdot) takes signed bytes only, so 8-bit codes are biased for it, too. Other processors use
// the compiler's vector extension.
#pragma once

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define BATON_SDOT
#endif

namespace baton {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define BATON_DPBUSD
constexpr int CODE_VECTOR_BYTES = 64, NUM_CODE_REGISTERS = 32;
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define BATON_DPBUSD
#endif
constexpr int CODE_VECTOR_BYTES = 32, NUM_CODE_REGISTERS = 16;
#else
constexpr int CODE_VECTOR_BYTES = 16, NUM_CODE_REGISTERS = NUM_REGISTERS;
#endif
constexpr int LANES = CODE_VECTOR_BYTES / 4;

#if defined(BATON_SDOT) || (defined(__AVX2__) && !defined(BATON_DPBUSD))
constexpr bool SIGNED_BYTES = true;  // 8-bit codes are multiplied with a sign
#else
constexpr bool SIGNED_BYTES = false;
#endif

using CodeVec = uint32_t __attribute__((vector_size(CODE_VECTOR_BYTES)));
using DotVec = int32_t __attribute__((vector_size(CODE_VECTOR_BYTES)));
using FactorVec = float __attribute__((vector_size(CODE_VECTOR_BYTES)));

constexpr int QUADS = 4;  // of a unit of 16 inputs

inline uint32_t load_quad(const int8_t* from) {
    return number_at<uint32_t>(from);
}

// What is subtracted from codes of that many bits before they are multiplied.
constexpr int code_bias(int bits) { return SIGNED_BYTES && bits == 8 ? 128 : 0; }

// Number of bits that tells how a unit is multiplied. Where it makes no difference, one for all.
constexpr int dot_bits(int bits) { return SIGNED_BYTES ? bits : 8; }

#if defined(BATON_DPBUSD)

template <int BITS>
inline DotVec add_unit(DotVec sum, const CodeVec (&quads)[QUADS], const int8_t* x) {
    for (int q = 0; q < QUADS; q++) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
        const __m512i inputs = _mm512_set1_epi32(int(load_quad(x + 4 * q)));
        sum = DotVec(_mm512_dpbusd_epi32(__m512i(sum), __m512i(quads[q]), inputs));
#else
        const __m256i inputs = _mm256_set1_epi32(int(load_quad(x + 4 * q)));
        sum = DotVec(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(quads[q]), inputs));
#endif
    }
    return sum;
}

#elif defined(__AVX2__)

inline __m256i sum_of_pairs(CodeVec codes, const int8_t* x) {
    return _mm256_maddubs_epi16(__m256i(codes), _mm256_set1_epi32(int(load_quad(x))));
}

inline __m256i sum_of_signed_pairs(CodeVec codes, const int8_t* x) {
    const auto numbers = __m256i(codes ^ 0x80808080u);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(numbers),
        _mm256_sign_epi8(_mm256_set1_epi32(int(load_quad(x))), numbers));
}

inline DotVec add_pairs(DotVec sum, __m256i pairs) {
    return sum + DotVec(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int BITS>
inline DotVec add_unit(DotVec sum, const CodeVec (&quads)[QUADS], const int8_t* x) {
    if constexpr (BITS == 8) {
        for (int q = 0; q < QUADS; q++) sum = add_pairs(sum, sum_of_signed_pairs(quads[q], x + 4 * q));
        return sum;
    }
    const __m256i first = _mm256_add_epi16(sum_of_pairs(quads[0], x), sum_of_pairs(quads[1], x + 4));
    const __m256i second = _mm256_add_epi16(sum_of_pairs(quads[2], x + 8), sum_of_pairs(quads[3], x + 12));
    if constexpr (BITS == 6) return add_pairs(add_pairs(sum, first), second);
    return add_pairs(sum, _mm256_add_epi16(first, second));
}

#elif defined(BATON_SDOT)

template <int BITS>
inline DotVec add_unit(DotVec sum, const CodeVec (&quads)[QUADS], const int8_t* x) {
    for (int q = 0; q < QUADS; q++) {
        const CodeVec numbers = BITS == 8 ? quads[q] ^ 0x80808080u : quads[q];
        sum = DotVec(vdotq_s32(int32x4_t(sum), int8x16_t(numbers), int8x16_t(vdupq_n_u32(load_quad(x + 4 * q)))));
    }
    return sum;
}

#else

template <int BITS>
inline DotVec add_unit(DotVec sum, const CodeVec (&quads)[QUADS], const int8_t* x) {
    for (int q = 0; q < QUADS; q++)
        for (int j = 0; j < 4; j++) sum += DotVec((quads[q] >> (8 * j)) & 0xffu) * int32_t(x[4 * q + j]);
    return sum;
}

#endif

// Replaces each byte of `codes`, below 16, by its entry of the table.
inline CodeVec look_up(CodeVec codes, const uint8_t* table) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return CodeVec(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), __m512i(codes)));
#elif defined(__AVX2__)
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return CodeVec(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), __m256i(codes)));
#else
    uint8_t bytes[CODE_VECTOR_BYTES];
    std::memcpy(bytes, &codes, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_vector<CodeVec>(bytes);
#endif
}

}  // namespace baton
