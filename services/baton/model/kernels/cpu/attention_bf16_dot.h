// What tiles of bfloat16 are made of where the processor has a dot product of pairs.
#pragma once

#include <type_traits>

#include "bf16_dot.h"
#include "online_softmax.h"

#ifdef BATON_PAIRS

namespace baton {

constexpr int LINE = LINE_BYTES / int(sizeof(Bf16));
constexpr int MAX_PAIR_DIM = 1024;  // of a head
constexpr int PAIR_TOKENS = KV_STRETCH;  // whose KV is gone over at once
alignas(64) inline const Bf16 NO_TOKEN[MAX_PAIR_DIM] = {};  // its key or value, where a tile is not full

// 2^x, exact where x is whole: a polynomial of the fraction (relative error below 3e-6: what it makes is rounded to bfloat16, which
// is 700 times as rough), scaled by the exponent.
inline __m512 exp2_lanes(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(9.5828553e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5906430e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312419e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// Of a score, not multiplied by `by` yet, beside the highest that was.
inline __m512 weight_of(__m512 score, __m512 by, __m512 top) { return exp2_lanes(_mm512_fmsub_ps(score, by, top)); }

// 16 rows of 16 words become 16 columns.
inline void transpose_words(__m512i* r) {
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

// 32 numbers of one row and of another become 32 words of a pair each.
inline void pair_up(const Bf16* a, const Bf16* b, uint32_t* out) {
    alignas(64) static const uint16_t in_turns[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(in_turns), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i of_a = _mm512_loadu_si512(a), of_b = _mm512_loadu_si512(b);
    _mm512_store_si512(out, _mm512_permutex2var_epi16(of_a, low, of_b));
    _mm512_store_si512(out + LANES, _mm512_permutex2var_epi16(of_a, high, of_b));
}

// Where the KV of PAIR_TOKENS tokens and of those lies that come next.
struct Places {
    static constexpr int COUNT = PAIR_TOKENS + AHEAD;

    const Bf16 *keys[COUNT], *values[COUNT];

    // From `begin` on; from `end` on there are none, or only zeros.
    void find(const KvRows<Bf16>& kv, int begin, int end) {
        const int here = std::min(COUNT, end - begin);
        kv.keys(begin, begin + here, keys);
        std::fill(keys + here, keys + COUNT, NO_TOKEN);
        std::fill(values + here, values + COUNT, NO_TOKEN);
        for (int i = 0; i < here; i++) values[i] = keys[i] + kv.v_offset;
    }
};

// Into the second cache: into the first one decode took a third longer (`bench/scenarios/engine/attention.py`).
inline void fetch(const Bf16* numbers) { _mm_prefetch(reinterpret_cast<const char*>(numbers), _MM_HINT_T1); }

// What products are added to: nothing, the sums that are there, or those times a factor for each lane.
enum class From { ZERO, SUMS, KEPT };

// Rows of pairs of numbers, each its own pointer; from a pair to the next `step` numbers.
struct Left {
    const Bf16* const* rows;
    int step;
};

// Lanes of pairs; from a pair to the next `step` words.
struct Right {
    const uint32_t* words;
    int step;
};

// sums [R, C * 16], of which rows are `stride` apart: pairs of left x pairs of right, added to what FROM says.
template <From FROM, int R, int C>
inline void multiply(float* sums, int stride, const Bf16* const* left, int left_step, Right right, int num_pairs, const float* keep) {
    __m512 acc[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            acc[r][c] = FROM == From::ZERO ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + size_t(r) * stride + c * LANES);
            if (FROM == From::KEPT) acc[r][c] = _mm512_mul_ps(acc[r][c], _mm512_load_ps(keep + c * LANES));
        }
    }
    for (int p = 0; p < num_pairs; p++) {
        __m512bh lanes[C];
        for (int c = 0; c < C; c++) lanes[c] = __m512bh(_mm512_load_si512(right.words + size_t(p) * right.step + c * LANES));
        for (int r = 0; r < R; r++) {
            const __m512bh both = __m512bh(_mm512_set1_epi32(int(pair_at(left[r] + size_t(p) * left_step))));
            for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], lanes[c], both);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) _mm512_storeu_ps(sums + size_t(r) * stride + c * LANES, acc[r][c]);
}

// go(vectors, its first lane) for stretches of 4, 2 or 1 vectors, of a multiple of 16 lanes.
template <typename Go>
inline void each_stretch(int lanes, const Go& go) {
    int lane = 0;
    for (; lane + 4 * LANES <= lanes; lane += 4 * LANES) go(std::integral_constant<int, 4>(), lane);
    for (; lane + 2 * LANES <= lanes; lane += 2 * LANES) go(std::integral_constant<int, 2>(), lane);
    if (lane < lanes) go(std::integral_constant<int, 1>(), lane);
}

template <int C>
constexpr int AT_ONCE = C == 4 ? 6 : 12;  // rows, whose sums fill the registers
static_assert(PAIR_TOKENS % LANES == 0 && PAIR_TOKENS % AT_ONCE<4> == 0 && PAIR_TOKENS % AT_ONCE<1> == 0);

// The same for any number of rows.
template <From FROM, int C>
inline void multiply_some(float* sums, int stride, Left left, int rows, Right right, int num_pairs, const float* keep = nullptr) {
    int r = 0;
    const auto go = [&](auto at_once) {
        constexpr int R = decltype(at_once)::value;
        for (; r + R <= rows; r += R) multiply<FROM, R, C>(sums + size_t(r) * stride, stride, left.rows + r, left.step, right, num_pairs, keep);
    };
    go(std::integral_constant<int, AT_ONCE<C>>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 2>());
    go(std::integral_constant<int, 1>());
}

}  // namespace baton

#endif
