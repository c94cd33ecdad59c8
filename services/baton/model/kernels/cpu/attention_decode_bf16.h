// Tiles of bfloat16, with the processor's dot product of pairs: many rows in panels (attention_prefill_bf16.h). Of few, as of those that decode, a lane is
// a token, and then a feature: keys are packed 16 tokens wide, so that no sum runs across lanes. Either way a row is added up in the same
// order: what it becomes does not depend on how many it is computed with, to the last bit, unless its KV is shared out among threads.
#pragma once

#include "attention_prefill_bf16.h"

#ifdef BATON_PAIRS

namespace baton {

constexpr int MANY_ROWS = 16;  // from here on panels are faster

// For head sizes that are multiples of 32, up to MAX_DIM.
class PairTile {
  public:
    static constexpr int MAX_DIM = MAX_PAIR_DIM;
    static constexpr int MOST_ROWS = MAX_ROWS;

    void attend(const Bf16* const* rows, int num_rows, const Limits* seen, const KvRows<Bf16>& kv, Limits range, float factor, Running& run) {
        if (num_rows >= MANY_ROWS) return panels_.attend(rows, num_rows, seen, kv, range, factor, run);
        const int dim = kv.head_dim;
        keys_.make_room(size_t(dim / 2) * PAIR_TOKENS);
        values_.make_room(size_t(PAIR_TOKENS / 2) * dim);
        const Bf16* weights[MANY_ROWS];
        for (int r = 0; r < num_rows; r++) weights[r] = weights_.data() + size_t(r) * PAIR_TOKENS;
        for (int begin = range.low; begin < range.high; begin += PAIR_TOKENS) {
            const int count = std::min(PAIR_TOKENS, range.high - begin), width = up(count, LANES);
            here_.find(kv, begin, range.high);
            for (int i = 0; i < width; i += LANES) pack(i, std::min(LANES, count - i), dim);
            multiply_all<From::ZERO>(scores_.data(), PAIR_TOKENS, {rows, 2}, num_rows, {keys_.data(), PAIR_TOKENS}, dim / 2, width);
            for (int r = 0; r < num_rows; r++) {
                const float keep = weigh(r, begin, width, seen[r], factor, run.most[r], run.total[r]);
                float* sums = &run.sums[size_t(r) * dim];
                if (keep != 1.0f)
                    for (int d = 0; d < dim; d++) sums[d] *= keep;
            }
            multiply_all<From::SUMS>(run.sums.data(), dim, {weights, 2}, num_rows, {values_.data(), dim}, (count + 1) / 2, dim);
        }
    }

  private:
    // `columns`: lanes in all, a multiple of 16.
    template <From FROM>
    static void multiply_all(float* sums, int stride, Left left, int rows, Right right, int pairs, int columns) {
        const auto go = [&](auto vectors, int c) {
            multiply_some<FROM, decltype(vectors)::value>(sums + c, stride, left, rows, {right.words + c, right.step}, pairs);
        };
        each_stretch(columns, go);
    }

    // 16 tokens of here_ from `column` on, of which `count` exist, to column `column` of the keys and row `column` of the values. Those that
    // are AHEAD are fetched meanwhile, a line for each line read: the processor does not guess where they lie, and asked for all of them at
    // once it stalls.
    void pack(int column, int count, int dim) {
        const Bf16* keys[LANES];
        const Bf16* values[LANES];
        for (int i = 0; i < LANES; i++) {
            keys[i] = i < count ? here_.keys[column + i] : NO_TOKEN;
            values[i] = i < count ? here_.values[column + i] : NO_TOKEN;
        }
        for (int d = 0; d < dim; d += LINE) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++) {
                r[i] = _mm512_loadu_si512(keys[i] + d);
                fetch(here_.keys[column + AHEAD + i] + d);
            }
            transpose_words(r);
            for (int i = 0; i < LANES; i++) _mm512_store_si512(keys_.data() + size_t(d / 2 + i) * PAIR_TOKENS + column, r[i]);
        }
        for (int i = 0; i < LANES; i += 2) {
            for (int d = 0; d < dim; d += LINE) {
                fetch(here_.values[column + AHEAD + i] + d);
                fetch(here_.values[column + AHEAD + i + 1] + d);
                pair_up(values[i] + d, values[i + 1] + d, values_.data() + size_t(column + i) / 2 * dim + d);
            }
        }
    }

    // As `soften` of online_softmax.h, in lanes; the weights are rounded to bfloat16, their total is not. Returns the factor for the old sums.
    float weigh(int row, int begin, int width, Limits seen, float factor, float& most, float& total) {
        const float* scores = scores_.data() + size_t(row) * PAIR_TOKENS;
        const __m512 by = _mm512_set1_ps(factor), never = _mm512_set1_ps(NEVER);
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_set1_epi32(seen.low), high = _mm512_set1_epi32(seen.high);
        const auto is_seen = [&](int i) {
            const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(begin + i), steps);
            return __mmask16(_mm512_cmpge_epi32_mask(index, low) & _mm512_cmplt_epi32_mask(index, high));
        };
        __m512 tops = never;
        for (int i = 0; i < width; i += LANES) tops = _mm512_max_ps(tops, _mm512_mask_mul_ps(never, is_seen(i), _mm512_load_ps(scores + i), by));
        const float top = std::max(most, _mm512_reduce_max_ps(tops));
        const float keep = _mm512_cvtss_f32(exp2_lanes(_mm512_set1_ps(most - top)));
        alignas(64) float both[PAIR_TOKENS];
        Bf16* out = weights_.data() + size_t(row) * PAIR_TOKENS;
        for (int i = 0; i < width; i += LANES) {
            const __m512 weight = _mm512_maskz_mov_ps(is_seen(i), weight_of(_mm512_load_ps(scores + i), by, _mm512_set1_ps(top)));
            _mm512_store_ps(both + i, _mm512_add_ps(weight, _mm512_permute_ps(weight, 0xb1)));
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), __m256i(_mm512_cvtneps_pbh(weight)));
        }
        float sum = 0.0f;
        for (int i = 0; i < width; i += 2) sum += both[i];
        most = top;
        total = std::fma(total, keep, sum);
        return keep;
    }

    PairPanels panels_;
    Places here_;
    Lines<uint32_t> keys_;    // [dim / 2, PAIR_TOKENS]
    Lines<uint32_t> values_;  // [PAIR_TOKENS / 2, dim]
    Lines<float> scores_{size_t(MANY_ROWS) * PAIR_TOKENS};
    Lines<Bf16> weights_{size_t(MANY_ROWS) * PAIR_TOKENS};
};

}  // namespace baton

#endif
