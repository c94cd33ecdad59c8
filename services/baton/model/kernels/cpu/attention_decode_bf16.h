// Attention tiles in bfloat16. Many rows, as in prefill, are computed by attention_prefill_bf16.h. For few
// rows, as in decode, a lane is a token for the scores and a feature for the values; keys are packed 16
// tokens wide, so no sum crosses lanes. Both sum a row in the same order. So a row's result is bit-identical
// however many rows are computed with it.
#pragma once

#include "attention_prefill_bf16.h"
#include "bf16_floats.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

constexpr int PREFILL_MIN_ROWS = 16;  // from here on the prefill code is faster

// For head sizes that are multiples of 32, up to MAX_DIM.
class AttentionTileBf16 {
  public:
    static constexpr int MAX_DIM = MAX_BF16_DIM;
    static constexpr int MAX_TILE_ROWS = MAX_ROWS;

    // kv_end: the end of the KV that is read afterwards, and prefetched meanwhile.
    template <typename S>
    void attend(const Bf16* const* rows, int num_rows, const KvRange* visible, const KvRows<S>& kv, KvRange range,
        int kv_end, float factor, SoftmaxState& state) {
        if (num_rows >= PREFILL_MIN_ROWS) {
            if (prefers_floats())
                return prefill_floats_.attend(rows, num_rows, visible, kv, range, kv_end, factor, state);
            return prefill_pairs_.attend(rows, num_rows, visible, kv, range, kv_end, factor, state);
        }
        const int dim = kv.head_dim;
        keys_.reserve(size_t(dim / 2) * BF16_BATCH_TOKENS);
        values_.reserve(size_t(BF16_BATCH_TOKENS / 2) * dim);
        KvPointers<S> pointers;
        const Bf16* weights[PREFILL_MIN_ROWS];
        for (int r = 0; r < num_rows; r++) weights[r] = weights_.data() + size_t(r) * BF16_BATCH_TOKENS;
        for (int begin = range.begin; begin < range.end; begin += BF16_BATCH_TOKENS) {
            const int count = std::min(BF16_BATCH_TOKENS, range.end - begin), width = round_up(count, BF16_LANES);
            pointers.find(kv, begin, kv_end);
            if constexpr (KvRows<S>::HAS_SCALES) scales_.find(kv, begin, begin + count, kv_end, factor);
            for (int i = 0; i < width; i += BF16_LANES) pack(pointers, i, dim);
            multiply_all<Accumulate::ZERO>(scores_.data(), BF16_BATCH_TOKENS, {rows, 2}, num_rows,
                {keys_.data(), BF16_BATCH_TOKENS}, dim / 2, width);
            for (int r = 0; r < num_rows; r++) {
                const float rescale = online_softmax_update<KvRows<S>::HAS_SCALES>(r, begin, width, visible[r], factor,
                    state.row_max[r], state.row_sum[r]);
                float* sums = &state.weighted_values[size_t(r) * dim];
                if (rescale != 1.0f)
                    for (int d = 0; d < dim; d++) sums[d] *= rescale;
            }
            multiply_all<Accumulate::SUMS>(state.weighted_values.data(), dim, {weights, 2}, num_rows,
                {values_.data(), dim}, (count + 1) / 2, dim);
        }
    }

  private:
    // `columns`: total number of lanes, a multiple of 16.
    template <Accumulate MODE>
    static void multiply_all(float* sums, int stride, BroadcastRows<PairProducts> left, int rows,
        PackedWords<PairProducts> right, int pairs, int columns) {
        const auto go = [&](auto vectors, int c) {
            multiply_rows_by_pairs<PairProducts, MODE, decltype(vectors)::value>(
                sums + c, stride, left, rows, {right.words + c, right.step}, pairs);
        };
        for_each_vector_group(columns, go);
    }

    // Packs 16 tokens from `column` on into the keys' columns and the values' rows. Meanwhile it prefetches tokens
    // that are PREFETCH_TOKENS further, one cache line per line read: the hardware cannot predict block tables, and
    // stalls if all lines are requested together. Missing tokens, which only the last batch has, are zeros.
    template <typename S>
    void pack(const KvPointers<S>& pointers, int column, int dim) {
        constexpr int PER_LINE = CACHE_LINE_BYTES / int(sizeof(S));
        const S *const *keys = pointers.keys + column, *const *values = pointers.values + column;
        // A store may change the buffers' members, as far as the compiler knows, but not these copies.
        uint32_t *to_keys = keys_.data() + column, *to_values = values_.data() + size_t(column / 2) * dim;
        for (int d = 0; d < dim; d += BF16_PER_LINE) {
            __m512i r[BF16_LANES];
            for (int i = 0; i < BF16_LANES; i++) {
                r[i] = load_as_bf16(keys[i] + d);
                if (d % PER_LINE == 0) fetch(keys[PREFETCH_TOKENS + i] + d);
            }
            transpose_words(r);
            for (int i = 0; i < BF16_LANES; i++)
                _mm512_store_si512(to_keys + size_t(d / 2 + i) * BF16_BATCH_TOKENS, r[i]);
        }
        for (int i = 0; i < BF16_LANES; i += 2, to_values += dim) {
            const S *even = values[i], *odd = values[i + 1];
            for (int d = 0; d < dim; d += BF16_PER_LINE) {
                if (d % PER_LINE == 0) {
                    fetch(values[PREFETCH_TOKENS + i] + d);
                    fetch(values[PREFETCH_TOKENS + i + 1] + d);
                }
                interleave_pairs(even + d, odd + d, to_values + d);
            }
        }
    }

    // online_softmax_update of online_softmax.h, vectorised. Weights are rounded to bfloat16, row_sum is not.
    // SCALED: scores and weights are multiplied by scales_.
    template <bool SCALED>
    float online_softmax_update(int row, int begin, int width, KvRange visible, float factor, float& row_max,
        float& row_sum) {
        const float* scores = scores_.data() + size_t(row) * BF16_BATCH_TOKENS;
        const __m512 scale = _mm512_set1_ps(factor), masked = _mm512_set1_ps(MASKED_SCORE);
        const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i kv_begin = _mm512_set1_epi32(visible.begin), kv_end = _mm512_set1_epi32(visible.end);
        const auto is_seen = [&](int i) {
            const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(begin + i), steps);
            return __mmask16(_mm512_cmpge_epi32_mask(index, kv_begin) & _mm512_cmplt_epi32_mask(index, kv_end));
        };
        const auto scale_at = [&](int i) { return SCALED ? _mm512_load_ps(scales_.keys + i) : scale; };
        __m512 maxima = masked;
        for (int i = 0; i < width; i += BF16_LANES) maxima
            = _mm512_max_ps(maxima, _mm512_mask_mul_ps(masked, is_seen(i), _mm512_load_ps(scores + i), scale_at(i)));
        const float new_max = std::max(row_max, _mm512_reduce_max_ps(maxima));
        const float rescale = _mm512_cvtss_f32(fast_exp2_bf16(_mm512_set1_ps(row_max - new_max)));
        alignas(64) float pair_sums[BF16_BATCH_TOKENS];
        Bf16* out = weights_.data() + size_t(row) * BF16_BATCH_TOKENS;
        for (int i = 0; i < width; i += BF16_LANES) {
            const __m512 weight = _mm512_maskz_mov_ps(is_seen(i),
                softmax_weight(_mm512_load_ps(scores + i), scale_at(i), _mm512_set1_ps(new_max)));
            _mm512_store_ps(pair_sums + i, _mm512_add_ps(weight, _mm512_permute_ps(weight, 0xb1)));
            const __m512 scaled
                = SCALED ? _mm512_maskz_mul_ps(is_seen(i), weight, _mm512_load_ps(scales_.values + i)) : weight;
            _mm256_store_si256(reinterpret_cast<__m256i*>(out + i), __m256i(_mm512_cvtneps_pbh(scaled)));
        }
        float sum = 0.0f;
        for (int i = 0; i < width; i += 2) sum += pair_sums[i];
        row_max = new_max;
        row_sum = std::fma(row_sum, rescale, sum);
        return rescale;
    }

    PrefillAttentionBf16<PairProducts> prefill_pairs_;
    PrefillAttentionBf16<FloatProducts> prefill_floats_;
    TokenScales scales_;
    AlignedBuffer<uint32_t> keys_;    // [dim / 2, BF16_BATCH_TOKENS]
    AlignedBuffer<uint32_t> values_;  // [BF16_BATCH_TOKENS / 2, dim]
    AlignedBuffer<float> scores_{size_t(PREFILL_MIN_ROWS) * BF16_BATCH_TOKENS};
    AlignedBuffer<Bf16> weights_{size_t(PREFILL_MIN_ROWS) * BF16_BATCH_TOKENS};
};

}  // namespace baton

#endif
