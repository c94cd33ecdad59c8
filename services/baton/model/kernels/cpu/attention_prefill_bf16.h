// Computes many query rows in bfloat16. A lane is a row, so no maximum and no sum crosses lanes, and keys
// keep their order. The rows are divided into panels of 4, 2 or 1 vectors. P: the products, see
// attention_bf16_products.h. Both give the same bits.
#pragma once

#include <algorithm>

#include "aligned_buffer.h"
#include "attention_bf16_products.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

template <typename P>
class PrefillAttentionBf16 {
  public:
    // S: type of the stored keys and values. kv_end: see attention_decode_bf16.h.
    template <typename S>
    void attend(const Bf16* const* rows, int num_rows, const KvRange* visible, const KvRows<S>& kv, KvRange range,
        int kv_end, float factor, SoftmaxState& state) {
        dim_ = kv.head_dim;
        width_ = round_up(num_rows, BF16_LANES);
        start(rows, num_rows, visible);
        for (int begin = range.begin; begin < range.end; begin += BF16_BATCH_TOKENS) {
            const int end = std::min(begin + BF16_BATCH_TOKENS, range.end);
            copy(kv, begin, end, kv_end);
            if constexpr (KvRows<S>::HAS_SCALES) scales_.find(kv, begin, end, kv_end, factor);
            for_each_vector_group(width_, [&](auto vectors, int lane) {
                add<decltype(vectors)::value, KvRows<S>::HAS_SCALES>(lane, begin, end, factor);
            });
        }
        finish(state, num_rows);
    }

  private:
    using Number = typename P::Number;
    using Word = typename P::Word;

    static constexpr int PER_WORD = P::NUMBERS_PER_WORD, MAX_WIDTH = 4 * BF16_LANES;

    // Lanes beyond the rows repeat the last row.
    void start(const Bf16* const* rows, int num_rows, const KvRange* visible) {
        queries_.reserve(size_t(dim_ / PER_WORD) * width_);
        keys_.reserve(size_t(BF16_BATCH_TOKENS) * dim_);
        values_.reserve(size_t(BF16_BATCH_TOKENS / PER_WORD) * dim_);
        sums_.reserve(size_t(dim_) * width_);
        scores_.reserve(size_t(BF16_BATCH_TOKENS) * MAX_WIDTH);
        weights_.reserve(size_t(BF16_BATCH_TOKENS / PER_WORD) * MAX_WIDTH);
        std::fill(sums_.data(), sums_.data() + size_t(dim_) * width_, 0.0f);
        for (int i = 0; i < BF16_BATCH_TOKENS; i++) tokens_[i] = keys_.data() + size_t(i) * dim_;
        for (int d = 0; d < dim_; d++) features_[d] = P::column(values_.data() + d);
        for (int lane = 0; lane < width_; lane++) {
            const KvRange limits = visible[std::min(lane, num_rows - 1)];
            visible_begin_[lane] = limits.begin;
            visible_end_[lane] = limits.end;
            row_max_[lane] = MASKED_SCORE;
            row_sum_[lane] = 0.0f;
        }
        for_each_vector_group(width_, [&](auto vectors, int first) {
            constexpr int WIDTH = decltype(vectors)::value * BF16_LANES;
            for (int lane = 0; lane < WIDTH; lane += BF16_LANES) {
                for (int d = 0; d < dim_; d += BF16_PER_LINE) {
                    __m512i r[BF16_LANES];
                    for (int i = 0; i < BF16_LANES; i++) r[i]
                        = _mm512_loadu_si512(rows[std::min(first + lane + i, num_rows - 1)] + d);
                    transpose_words(r);
                    for (int i = 0; i < BF16_LANES; i++)
                        P::store_pairs(r[i], queries_of(first) + word(d / 2 + i) * WIDTH + lane, WIDTH);
                }
            }
        });
    }

    // Copies the keys and values of [begin, end) to consecutive memory, as the products need them, once for all
    // panels. In the blocks, the KV of one head may lie at multiples of a large power of two. It would then
    // map to few cache sets and not stay in the cache. Meanwhile the next tokens are prefetched.
    template <typename S>
    void copy(const KvRows<S>& kv, int begin, int end, int kv_end) {
        constexpr int NEXT = 16, PER_LINE = CACHE_LINE_BYTES / int(sizeof(S));
        static_assert(NEXT <= PREFETCH_TOKENS);
        const int count = end - begin;
        KvPointers<S> pointers;
        pointers.find(kv, begin, kv_end);
        for (int i = 0; i < round_up(count, ROWS_IN_REGISTERS<1>); i += 2) {
            for (int next = i + NEXT; next < i + NEXT + 2; next++) {
                for (int d = 0; d < dim_; d += PER_LINE) {
                    fetch(pointers.keys[next] + d);
                    fetch(pointers.values[next] + d);
                }
            }
            const bool is_first = i < count, is_second = i + 1 < count;
            const S *key = is_first ? pointers.keys[i] : ZERO_ROW<S>,
                *next_key = is_second ? pointers.keys[i + 1] : ZERO_ROW<S>;
            const S *value = is_first ? pointers.values[i] : ZERO_ROW<S>,
                *next_value = is_second ? pointers.values[i + 1] : ZERO_ROW<S>;
            for (int d = 0; d < dim_; d += BF16_PER_LINE) {
                P::store_key(key + d, keys_.data() + size_t(i) * dim_ + d);
                P::store_key(next_key + d, keys_.data() + size_t(i + 1) * dim_ + d);
                P::store_values(value + d, next_value + d, values_.data() + word(i / 2) * dim_ + d, dim_);
            }
        }
    }

    // Number of the first word of a pair.
    static size_t word(int pair) { return size_t(pair) * (2 / PER_WORD); }

    // Queries [words of dim, lanes] and sums [dim, lanes] of the panel that begins at `lane`.
    Word* queries_of(int lane) const { return queries_.data() + size_t(lane) * (dim_ / PER_WORD); }
    float* sums_of(int lane) const { return sums_.data() + size_t(lane) * dim_; }

    // Processes the tokens [begin, end) for the panel of C vectors that begins at `lane`.
    template <int C, bool SCALED>
    void add(int lane, int begin, int end, float factor) {
        constexpr int WIDTH = C * BF16_LANES;
        const auto [least_low, most_low] = std::minmax_element(visible_begin_ + lane, visible_begin_ + lane + WIDTH);
        const auto [least_high, most_high] = std::minmax_element(visible_end_ + lane, visible_end_ + lane + WIDTH);
        const int count = std::min(end, *most_high) - begin;
        if (count <= 0 || end <= *least_low) return;  // no row sees any of these tokens
        alignas(64) float rescale[WIDTH];
        multiply_rows_by_pairs<P, Accumulate::ZERO, C>(scores_.data(), WIDTH, {tokens_, PER_WORD},
            round_up(count, ROWS_IN_REGISTERS<C>), {queries_of(lane), WIDTH}, dim_ / 2);
        if (begin >= *most_low && begin + count <= *least_high) {
            online_softmax_update<C, SCALED, true>(lane, begin, count, factor, rescale);
        } else {
            online_softmax_update<C, SCALED, false>(lane, begin, count, factor, rescale);
        }
        rescale_sums<C>(sums_of(lane), rescale);
        multiply_rows_by_pairs<P, Accumulate::SUMS, C>(sums_of(lane), WIDTH, {features_, PER_WORD * dim_}, dim_,
            {weights_.data(), WIDTH}, (count + 1) / 2);
    }

    // Multiplies earlier sums by a factor per lane. It is 1 unless the lane's maximum has changed.
    template <int C>
    void rescale_sums(float* sums, const float* rescale) const {
        constexpr int WIDTH = C * BF16_LANES;
        if (std::all_of(rescale, rescale + WIDTH, [](float factor) { return factor == 1.0f; })) return;
        for (int d = 0; d < dim_; d++)
            for (int lane = 0; lane < WIDTH; lane++) sums[size_t(d) * WIDTH + lane] *= rescale[lane];
    }

    // online_softmax_update of online_softmax.h, each lane separately. Weights are rounded to bfloat16 and
    // stored as pairs of tokens; the row sums are not rounded. SCALED: scores and weights are multiplied by
    // scales_. ALL_VISIBLE: every lane sees all of these tokens. `rescale`: the factors for the earlier sums.
    template <int C, bool SCALED, bool ALL_VISIBLE>
    void online_softmax_update(int lane, int begin, int count, float factor, float* rescale) {
        constexpr int WIDTH = C * BF16_LANES;
        const __m512 scale = _mm512_set1_ps(factor), masked = _mm512_set1_ps(MASKED_SCORE);
        const auto is_seen = [&](int c, int i) {
            const __m512i index = _mm512_set1_epi32(begin + i);
            return __mmask16(
                _mm512_cmpge_epi32_mask(index, _mm512_load_si512(visible_begin_ + lane + c * BF16_LANES)) &
                _mm512_cmplt_epi32_mask(index, _mm512_load_si512(visible_end_ + lane + c * BF16_LANES)));
        };
        const float* scores = scores_.data();
        Word* weights = weights_.data();
        const auto score = [&](int c, int i) { return _mm512_load_ps(scores + (i * C + c) * BF16_LANES); };
        const auto scale_of = [&](int i) { return SCALED ? _mm512_set1_ps(scales_.keys[i]) : scale; };
        __m512 new_max[C], sum[C];
        for (int c = 0; c < C; c++) {
            new_max[c] = _mm512_load_ps(row_max_ + lane + c * BF16_LANES);
            sum[c] = _mm512_setzero_ps();
        }
        for (int i = 0; i < count; i++)
            for (int c = 0; c < C; c++)
                new_max[c] = _mm512_max_ps(new_max[c],
                    _mm512_mask_mul_ps(masked, ALL_VISIBLE ? __mmask16(0xffff) : is_seen(c, i), score(c, i),
                        scale_of(i)));
        for (int c = 0; c < C; c++) {
            float* row_max = row_max_ + lane + c * BF16_LANES;
            _mm512_store_ps(rescale + c * BF16_LANES,
                fast_exp2_bf16(_mm512_sub_ps(_mm512_load_ps(row_max), new_max[c])));
            _mm512_store_ps(row_max, new_max[c]);
        }
        const auto weight = [&](int c, int i) {
            const __m512 value = softmax_weight(score(c, i), scale_of(i), new_max[c]);
            return ALL_VISIBLE ? value : _mm512_maskz_mov_ps(is_seen(c, i), value);
        };
        const auto scaled = [&](int c, int i, __m512 of) {
            if (!SCALED) return of;
            const __m512 by = _mm512_set1_ps(scales_.values[i]);
            return ALL_VISIBLE ? _mm512_mul_ps(of, by) : _mm512_maskz_mul_ps(is_seen(c, i), of, by);
        };
        alignas(64) static const uint16_t interleaved[32]
            = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i order = _mm512_load_si512(interleaved);
        for (int i = 0; i < count; i += 2) {
            for (int c = 0; c < C; c++) {
                const __m512 a = weight(c, i), b = i + 1 < count ? weight(c, i + 1) : _mm512_setzero_ps();
                sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(a, b));
                const __m512 second = i + 1 < count ? scaled(c, i + 1, b) : b;
                const __m512i both = __m512i(_mm512_cvtne2ps_pbh(second, scaled(c, i, a)));
                P::store_pairs(_mm512_permutexvar_epi16(order, both),
                    weights + word(i / 2) * WIDTH + c * BF16_LANES, WIDTH);
            }
        }
        for (int c = 0; c < C; c++) {
            float* row_sum = row_sum_ + lane + c * BF16_LANES;
            _mm512_store_ps(row_sum,
                _mm512_fmadd_ps(_mm512_load_ps(row_sum), _mm512_load_ps(rescale + c * BF16_LANES), sum[c]));
        }
    }

    void finish(SoftmaxState& state, int num_rows) const {
        std::copy(row_max_, row_max_ + num_rows, state.row_max.begin());
        std::copy(row_sum_, row_sum_ + num_rows, state.row_sum.begin());
        for_each_vector_group(width_, [&](auto vectors, int first) {
            constexpr int WIDTH = decltype(vectors)::value * BF16_LANES;
            for (int lane = 0; lane < WIDTH; lane += BF16_LANES) {
                for (int d = 0; d < dim_; d += BF16_LANES) {
                    __m512i r[BF16_LANES];
                    for (int i = 0; i < BF16_LANES; i++) r[i]
                        = _mm512_load_si512(sums_of(first) + size_t(d + i) * WIDTH + lane);
                    transpose_words(r);
                    for (int i = 0, row = first + lane; i < BF16_LANES && row < num_rows; i++, row++)
                        _mm512_storeu_si512(&state.weighted_values[size_t(row) * dim_ + d], r[i]);
                }
            }
        });
    }

    int dim_ = 0, width_ = 0;  // head size; total number of lanes, a multiple of 16
    AlignedBuffer<Word> queries_;  // panel by panel, see `queries_of`
    AlignedBuffer<float> sums_;  // panel by panel, see `sums_of`
    AlignedBuffer<Number> keys_;  // [BF16_BATCH_TOKENS, dim]
    AlignedBuffer<Word> values_;  // [words of BF16_BATCH_TOKENS, dim]
    const Number* tokens_[BF16_BATCH_TOKENS];  // rows of keys_
    const Number* features_[MAX_BF16_DIM];  // columns of values_
    AlignedBuffer<float> scores_;  // [BF16_BATCH_TOKENS, lanes of a panel]
    AlignedBuffer<Word> weights_;  // [words of BF16_BATCH_TOKENS, lanes of a panel]
    TokenScales scales_;
    alignas(64) int32_t visible_begin_[MAX_ROWS], visible_end_[MAX_ROWS];
    alignas(64) float row_max_[MAX_ROWS], row_sum_[MAX_ROWS];
};

}  // namespace baton

#endif
