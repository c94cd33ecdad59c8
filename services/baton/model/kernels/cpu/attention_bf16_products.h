// The products of the bfloat16 attention tiles: dot products of pairs, or products of floats with the same bits.
//
// The left operand is one pointer per row, the right one vectors of 16 lanes. Both have pairs of bfloat16 along the
// sum. Products differ in how they store them: as pairs, or widened to floats in the order of the numbers.
#pragma once

#include <type_traits>

#include "attention_bf16_dot.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

// For few rows, and for many where the dot product is the faster one. A word is a pair.
struct PairProducts {
    using Number = Bf16;    // of a left operand
    using Word = uint32_t;  // of a right operand, in one lane
    struct Rounding {};

    static constexpr int NUMBERS_PER_WORD = 2;

    // 32 numbers of a key.
    template <typename S>
    static void store_key(const S* key, Bf16* to) {
        _mm512_store_si512(to, load_as_bf16(key));
    }

    // 32 numbers of the values of two tokens. stride: distance of the rows of words.
    template <typename S>
    static void store_values(const S* first, const S* second, uint32_t* to, int) {
        interleave_pairs(first, second, to);
    }

    // A column of stored values, as a left operand.
    static const Bf16* column(const uint32_t* values) { return reinterpret_cast<const Bf16*>(values); }

    // 16 lanes of pairs, as a right operand.
    static void store_pairs(__m512i pairs, uint32_t* to, int) { _mm512_store_si512(to, pairs); }

    // Adds the products of one pair. `left`, `right`: of the first pair; a word is `step` from the next one.
    template <int R, int C>
    static void add(__m512 (&acc)[R][C], const Bf16* const* left, int left_step, const uint32_t* right, int right_step,
        int pair) {
        __m512bh lanes[C];
        for (int c = 0; c < C; c++)
            lanes[c] = __m512bh(_mm512_load_si512(right + size_t(pair) * right_step + c * BF16_LANES));
        for (int r = 0; r < R; r++) {
            const __m512bh both = __m512bh(_mm512_set1_epi32(int(load_bf16_pair(left[r] + size_t(pair) * left_step))));
            for (int c = 0; c < C; c++) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], lanes[c], both);
        }
    }
};

// For many rows, where it is the faster one: see DotRounding. A word is a number.
struct FloatProducts {
    using Number = float;
    using Word = float;
    using Rounding = DotRounding;

    static constexpr int NUMBERS_PER_WORD = 1;

    template <typename S>
    static void store_key(const S* key, float* to) {
        _mm512_store_ps(to, load_as_floats(key));
        _mm512_store_ps(to + BF16_LANES, load_as_floats(key + BF16_LANES));
    }

    template <typename S>
    static void store_values(const S* first, const S* second, float* to, int stride) {
        store_key(first, to);
        store_key(second, to + stride);
    }

    static const float* column(const float* values) { return values; }

    static void store_pairs(__m512i pairs, float* to, int stride) {
        _mm512_store_ps(to, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
        _mm512_store_ps(to + stride, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))));
    }

    // The second number of the pair comes first, as in the dot product.
    template <int R, int C>
    static void add(__m512 (&acc)[R][C], const float* const* left, int left_step, const float* right, int right_step,
        int pair) {
        for (int i = 2 * pair + 1; i >= 2 * pair; i--) {
            __m512 lanes[C];
            for (int c = 0; c < C; c++) lanes[c] = _mm512_load_ps(right + size_t(i) * right_step + c * BF16_LANES);
            for (int r = 0; r < R; r++) {
                const __m512 number = _mm512_set1_ps(left[r][size_t(i) * left_step]);
                for (int c = 0; c < C; c++) acc[r][c] = _mm512_fmadd_ps(lanes[c], number, acc[r][c]);
            }
        }
    }
};

// Left operand: one pointer per row; consecutive words are `step` numbers apart.
template <typename P>
struct BroadcastRows {
    const typename P::Number* const* rows;
    int step;
};

// Right operand: vectors of words; consecutive ones are `step` words apart.
template <typename P>
struct PackedWords {
    const typename P::Word* words;
    int step;
};

// Initial value of the accumulators: zero, or the existing sums.
enum class Accumulate { ZERO, SUMS };

// sums [R, C * 16], rows `stride` apart: left pairs times right pairs, added to the initial value that MODE
// selects.
template <typename P, Accumulate MODE, int R, int C>
inline void multiply(float* sums, int stride, const typename P::Number* const* left, int left_step,
    PackedWords<P> right, int num_pairs) {
    __m512 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = MODE == Accumulate::ZERO ? _mm512_setzero_ps()
                                                 : _mm512_loadu_ps(sums + size_t(r) * stride + c * BF16_LANES);
    for (int pair = 0; pair < num_pairs; pair++) P::add(acc, left, left_step, right.words, right.step, pair);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) _mm512_storeu_ps(sums + size_t(r) * stride + c * BF16_LANES, acc[r][c]);
}

// Calls go(number of vectors, first lane) for groups of 4, 2 or 1 vectors; `lanes` is a multiple of 16.
template <typename Go>
inline void for_each_vector_group(int lanes, const Go& go) {
    int lane = 0;
    for (; lane + 4 * BF16_LANES <= lanes; lane += 4 * BF16_LANES) go(std::integral_constant<int, 4>(), lane);
    for (; lane + 2 * BF16_LANES <= lanes; lane += 2 * BF16_LANES) go(std::integral_constant<int, 2>(), lane);
    if (lane < lanes) go(std::integral_constant<int, 1>(), lane);
}

template <int C>
constexpr int ROWS_IN_REGISTERS = C == 4 ? 6 : 12;  // rows whose sums fill the registers
static_assert(BF16_BATCH_TOKENS % BF16_LANES == 0 && BF16_BATCH_TOKENS % ROWS_IN_REGISTERS<4> == 0
    && BF16_BATCH_TOKENS % ROWS_IN_REGISTERS<1> == 0);

// Does the same as `multiply` for any number of rows.
template <typename P, Accumulate MODE, int C>
inline void multiply_rows_by_pairs(float* sums, int stride, BroadcastRows<P> left, int rows, PackedWords<P> right,
    int num_pairs) {
    [[maybe_unused]] const typename P::Rounding rounding;
    int r = 0;
    const auto go = [&](auto at_once) {
        constexpr int R = decltype(at_once)::value;
        for (; r + R <= rows; r += R)
            multiply<P, MODE, R, C>(sums + size_t(r) * stride, stride, left.rows + r, left.step, right, num_pairs);
    };
    go(std::integral_constant<int, ROWS_IN_REGISTERS<C>>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 2>());
    go(std::integral_constant<int, 1>());
}

}  // namespace baton

#endif
