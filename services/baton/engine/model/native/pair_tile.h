// Tiles of bfloat16, with the processor's dot product of pairs. Keys are packed 16 tokens wide, so that a lane is a token and no sum runs
// across lanes; values are packed so that a lane is a feature.
#pragma once

#include "pairs.h"
#include "tile.h"

#ifdef BATON_PAIRS

namespace baton {

constexpr int LINE = LINE_BYTES / int(sizeof(Bf16));

// 2^x for x <= 0: a polynomial of the fraction (relative error below 2e-7), scaled by the exponent.
inline __m512 exp2_lanes(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

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

inline __m512 dot_pairs(__m512 sum, __m512i lanes, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, __m512bh(lanes), __m512bh(_mm512_set1_epi32(int(pair))));
}

// sums[R][C * 16] += pairs of left[R] x pairs of right: the one inner loop of both products. `right` has `right_step` words from one pair
// to the next, `left` its pairs one after the other.
template <int R, int C>
inline void multiply(float* sums, int sum_stride, const Bf16* const* left, const uint32_t* right, int right_step, int num_pairs) {
    __m512 acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = _mm512_loadu_ps(sums + size_t(r) * sum_stride + c * LANES);
    for (int p = 0; p < num_pairs; p++) {
        __m512i lanes[C];
        for (int c = 0; c < C; c++) lanes[c] = _mm512_loadu_si512(right + size_t(p) * right_step + c * LANES);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) acc[r][c] = dot_pairs(acc[r][c], lanes[c], pair_at(left[r] + 2 * p));
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) _mm512_storeu_ps(sums + size_t(r) * sum_stride + c * LANES, acc[r][c]);
}

template <int C>
inline void multiply_rows(float* sums, int sum_stride, const Bf16* const* left, int rows, const uint32_t* right, int right_step, int pairs) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) multiply<6, C>(sums + size_t(r) * sum_stride, sum_stride, left + r, right, right_step, pairs);
    for (; r + 2 <= rows; r += 2) multiply<2, C>(sums + size_t(r) * sum_stride, sum_stride, left + r, right, right_step, pairs);
    for (; r < rows; r++) multiply<1, C>(sums + size_t(r) * sum_stride, sum_stride, left + r, right, right_step, pairs);
}

// `columns`: lanes in all, a multiple of 16.
inline void multiply_all(
    float* sums, int sum_stride, const Bf16* const* left, int rows, const uint32_t* right, int right_step, int pairs, int columns) {
    int c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES) multiply_rows<4>(sums + c, sum_stride, left, rows, right + c, right_step, pairs);
    for (; c < columns; c += LANES) multiply_rows<1>(sums + c, sum_stride, left, rows, right + c, right_step, pairs);
}

// bfloat16, for head sizes that are multiples of 32, up to MAX_DIM.
class PairTile {
   public:
    static constexpr int MAX_DIM = 1024;

    void attend(const Bf16* const* rows, int num_rows, const Limits* seen, const KvRows<Bf16>& kv, Limits range, float factor, Running& run) {
        const int dim = kv.head_dim;
        keys_.resize(size_t(dim / 2) * KV_TILE);
        values_.resize(size_t(dim) * KV_TILE / 2);
        scores_.resize(size_t(num_rows) * KV_TILE);
        weights_.resize(size_t(num_rows) * KV_TILE);
        const Bf16* weights[MAX_ROWS];
        for (int r = 0; r < num_rows; r++) weights[r] = &weights_[size_t(r) * KV_TILE];
        for (int begin = range.low; begin < range.high; begin += KV_TILE) {
            const int count = std::min(KV_TILE, range.high - begin), width = up(count, LANES);
            for (int i = 0; i < width; i += LANES) {
                const int here = std::min(LANES, count - i);
                pack(kv, begin + i, here, i, std::min(begin + i + AHEAD, range.high - 1));
            }
            std::fill(scores_.begin(), scores_.end(), 0.0f);
            multiply_all(scores_.data(), KV_TILE, rows, num_rows, keys_.data(), KV_TILE, dim / 2, width);
            for (int r = 0; r < num_rows; r++) weigh(r, begin, width, seen[r], factor, run, dim);
            multiply_all(run.sums.data(), dim, weights, num_rows, values_.data(), dim, width / 2, dim);
        }
    }

   private:
    // 16 tokens from `index` on, of which `count` exist, to column `column` of the keys and row `column` of the values.
    // `ahead`: a token whose KV, and that of the 15 after it, is fetched meanwhile, a line for each line read: the processor does not guess
    // where the next stretch lies, and asked for all of it at once it stalls. What that brings is in docs/benchmarks.md.
    void pack(const KvRows<Bf16>& kv, int index, int count, int column, int ahead) {
        const int dim = kv.head_dim;
        const Bf16* next_key = kv.key(ahead);
        const Bf16* next_value = kv.value(ahead);
        alignas(64) static const Bf16 nothing[MAX_DIM] = {};
        const Bf16* keys[LANES];
        const Bf16* values[LANES];
        for (int i = 0; i < LANES; i++) {
            keys[i] = i < count ? kv.key(index + i) : nothing;
            values[i] = i < count ? kv.value(index + i) : nothing;
        }
        for (int d = 0; d < dim; d += 2 * LANES) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++, next_key += LINE) {
                r[i] = _mm512_loadu_si512(keys[i] + d);
                _mm_prefetch(reinterpret_cast<const char*>(next_key), _MM_HINT_T0);
            }
            transpose_words(r);
            for (int i = 0; i < LANES; i++) _mm512_storeu_si512(&keys_[size_t(d / 2 + i) * KV_TILE + column], r[i]);
        }
        alignas(64) static const uint16_t first[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i low = _mm512_load_si512(first), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int i = 0; i < LANES; i += 2) {
            uint32_t* out = &values_[size_t(column + i) / 2 * dim];
            for (int d = 0; d < dim; d += 2 * LANES) {
                const __m512i a = _mm512_loadu_si512(values[i] + d), b = _mm512_loadu_si512(values[i + 1] + d);
                for (int line = 0; line < 2; line++, next_value += LINE) _mm_prefetch(reinterpret_cast<const char*>(next_value), _MM_HINT_T0);
                _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
                _mm512_storeu_si512(out + d + LANES, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }

    // As `soften`, in lanes; the weights are rounded to bfloat16, their total is not.
    void weigh(int row, int begin, int width, Limits seen, float factor, Running& run, int dim) {
        float* scores = &scores_[size_t(row) * KV_TILE];
        const __m512 by = _mm512_set1_ps(factor), never = _mm512_set1_ps(NEVER);
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_set1_epi32(seen.low), high = _mm512_set1_epi32(seen.high);
        __m512 tops = never;
        for (int i = 0; i < width; i += LANES) {
            const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(begin + i), steps);
            const __mmask16 is_seen = _mm512_cmpge_epi32_mask(index, low) & _mm512_cmplt_epi32_mask(index, high);
            const __m512 score = _mm512_mask_mul_ps(never, is_seen, _mm512_loadu_ps(scores + i), by);
            _mm512_storeu_ps(scores + i, score);
            tops = _mm512_max_ps(tops, score);
        }
        const float top = std::max(run.most[row], _mm512_reduce_max_ps(tops));
        const float keep = std::exp2(run.most[row] - top);
        const __m512 most = _mm512_set1_ps(top);
        __m512 sum = _mm512_setzero_ps();
        Bf16* out = &weights_[size_t(row) * KV_TILE];
        for (int i = 0; i < width; i += LANES) {
            const __m512 score = _mm512_loadu_ps(scores + i);
            const __mmask16 is_seen = _mm512_cmp_ps_mask(score, never, _CMP_NLE_UQ);  // NaN is seen, and stays
            const __m512 weight = _mm512_maskz_mov_ps(is_seen, exp2_lanes(_mm512_sub_ps(score, most)));
            sum = _mm512_add_ps(sum, weight);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), __m256i(_mm512_cvtneps_pbh(weight)));
        }
        run.most[row] = top;
        run.total[row] = run.total[row] * keep + _mm512_reduce_add_ps(sum);
        if (keep == 1.0f) return;
        float* sums = &run.sums[size_t(row) * dim];
        for (int d = 0; d < dim; d++) sums[d] *= keep;
    }

    std::vector<uint32_t> keys_, values_;
    std::vector<Bf16> weights_;
    std::vector<float> scores_;
};

}  // namespace baton

#endif
