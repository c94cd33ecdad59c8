// Building blocks of the bfloat16 attention tiles, for processors with the bfloat16 dot product.
#pragma once

#include "bf16_dot.h"
#include "online_softmax.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

constexpr int BF16_PER_LINE = CACHE_LINE_BYTES / int(sizeof(Bf16));
constexpr int MAX_BF16_DIM = 1024;  // largest supported head size
constexpr int BF16_BATCH_TOKENS = KV_BATCH;  // tokens processed at a time
// Stands for missing tokens of a tile that is not full.
template <typename S>
alignas(64) inline const S ZERO_ROW[MAX_BF16_DIM] = {};

// 2^x, exact for integers: a polynomial of the fraction, scaled by the exponent. The relative error is below
// 3e-6; the result is rounded to bfloat16, which is 700 times as coarse.
inline __m512 fast_exp2_bf16(__m512 x) {
    const __m512 combined = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, combined);
    __m512 p = _mm512_set1_ps(9.5828553e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5906430e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312419e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, combined);
}

// Softmax weight of an unscaled score: 2^(score * scale - new_max).
inline __m512 softmax_weight(__m512 score, __m512 scale, __m512 new_max) {
    return fast_exp2_bf16(_mm512_fmsub_ps(score, scale, new_max));
}

// Transposes 16 rows of 16 words. Inlined, so that they stay in registers.
__attribute__((always_inline)) inline void transpose_words(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// Loads 16 numbers of a row as floats.
inline __m512 load_as_floats(const Bf16* from) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}
inline __m512 load_as_floats(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Loads 32 numbers of a row as bfloat16. Integers of 8 bits are exact in bfloat16.
inline __m512i load_as_bf16(const Bf16* from) { return _mm512_loadu_si512(from); }
inline __m512i load_as_bf16(const int8_t* from) {
    return __m512i(_mm512_cvtne2ps_pbh(load_as_floats(from + BF16_LANES), load_as_floats(from)));
}

// Interleaves 32 numbers of two rows into 32 words, one pair each.
template <typename S>
inline void interleave_pairs(const S* a, const S* b, uint32_t* out) {
    alignas(64) static const uint16_t interleaved[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(interleaved), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i of_a = load_as_bf16(a), of_b = load_as_bf16(b);
    _mm512_store_si512(out, _mm512_permutex2var_epi16(of_a, low, of_b));
    _mm512_store_si512(out + BF16_LANES, _mm512_permutex2var_epi16(of_a, high, of_b));
}

// Addresses of the KV of BF16_BATCH_TOKENS tokens and of the tokens to prefetch after them. S: type of the
// stored numbers.
template <typename S>
struct KvPointers {
    static constexpr int COUNT = BF16_BATCH_TOKENS + PREFETCH_TOKENS;

    const S *keys[COUNT], *values[COUNT];

    // Fills in the tokens from `begin` on. Entries beyond `end` and before `kv.first` point to zeros.
    void find(const KvRows<S>& kv, int begin, int end) {
        const int here = std::min(COUNT, end - begin), skipped = std::clamp(kv.first - begin, 0, here);
        kv.keys(begin + skipped, begin + here, keys + skipped);
        for (const S** pointers : {keys, values}) {
            std::fill(pointers, pointers + skipped, ZERO_ROW<S>);
            std::fill(pointers + here, pointers + COUNT, ZERO_ROW<S>);
        }
        for (int i = skipped; i < here; i++) values[i] = keys[i] + kv.v_offset;
    }
};

// Scales of the keys, times a factor, and of the values of BF16_BATCH_TOKENS tokens. A score is multiplied by
// its key's scale, a weight by its value's scale, so that integers need not be.
struct TokenScales {
    alignas(64) float keys[BF16_BATCH_TOKENS], values[BF16_BATCH_TOKENS];

    // Fills in the tokens [begin, end) of a range that ends at `kv_end`. Scales beyond them are 0.
    void find(const KvRows<int8_t>& kv, int begin, int end, int kv_end, float factor) {
        kv.token_scales(begin, end, kv_end, keys, values);
        std::fill(keys + (end - begin), keys + BF16_BATCH_TOKENS, 0.0f);
        std::fill(values + (end - begin), values + BF16_BATCH_TOKENS, 0.0f);
        for (int i = 0; i < BF16_BATCH_TOKENS; i++) keys[i] *= factor;
    }
};

// Prefetches into L2. Into L1, decode took a third longer (`bench/scenarios/engine/attention.py`).
template <typename S>
inline void fetch(const S* numbers) { _mm_prefetch(reinterpret_cast<const char*>(numbers), _MM_HINT_T1); }

}  // namespace baton

#endif
