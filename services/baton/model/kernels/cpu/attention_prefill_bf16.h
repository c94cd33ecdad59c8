// Many query rows in panels: a lane is a row, so that no maximum and no sum runs across lanes, and keys need no other order.
#pragma once

#include <algorithm>

#include "aligned_buffer.h"
#include "attention_bf16_dot.h"

#ifdef BATON_PAIRS

namespace baton {

class PairPanels {
  public:
    void attend(const Bf16* const* rows, int num_rows, const Limits* seen, const KvRows<Bf16>& kv, Limits range, float factor, Running& run) {
        dim_ = kv.head_dim;
        width_ = up(num_rows, LANES);
        start(rows, num_rows, seen);
        for (int begin = range.low; begin < range.high; begin += PAIR_TOKENS) {
            const int end = std::min(begin + PAIR_TOKENS, range.high);
            copy(kv, begin, end, range.high);
            each_stretch(width_, [&](auto vectors, int lane) { add<decltype(vectors)::value>(lane, begin, end, factor); });
        }
        finish(run, num_rows);
    }

  private:
    // Lanes beyond the rows do as the last row does.
    void start(const Bf16* const* rows, int num_rows, const Limits* seen) {
        queries_.make_room(size_t(dim_ / 2) * width_);
        keys_.make_room(size_t(PAIR_TOKENS) * dim_);
        values_.make_room(size_t(PAIR_TOKENS / 2) * dim_);
        sums_.make_room(size_t(dim_) * width_);
        std::fill(sums_.data(), sums_.data() + size_t(dim_) * width_, 0.0f);
        for (int i = 0; i < PAIR_TOKENS; i++) tokens_[i] = keys_.data() + size_t(i) * dim_;
        for (int d = 0; d < dim_; d++) features_[d] = reinterpret_cast<const Bf16*>(values_.data() + d);
        for (int lane = 0; lane < width_; lane++) {
            const Limits limits = seen[std::min(lane, num_rows - 1)];
            low_[lane] = limits.low;
            high_[lane] = limits.high;
            most_[lane] = NEVER;
            total_[lane] = 0.0f;
        }
        each_stretch(width_, [&](auto vectors, int first) {
            constexpr int WIDTH = decltype(vectors)::value * LANES;
            for (int lane = 0; lane < WIDTH; lane += LANES) {
                for (int d = 0; d < dim_; d += LINE) {
                    __m512i r[LANES];
                    for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_si512(rows[std::min(first + lane + i, num_rows - 1)] + d);
                    transpose_words(r);
                    for (int i = 0; i < LANES; i++) _mm512_store_si512(queries_of(first) + size_t(d / 2 + i) * WIDTH + lane, r[i]);
                }
            }
        });
    }

    // The keys of [begin, end) one after the other, values in pairs of tokens, so that all panels find them together: in their blocks the KV of
    // a head may lie as many bytes apart as a cache has places for, and then most of it is in none. Meanwhile what comes next is fetched.
    void copy(const KvRows<Bf16>& kv, int begin, int end, int high) {
        constexpr int NEXT = 16;
        static_assert(NEXT <= AHEAD);
        const int count = end - begin;
        here_.find(kv, begin, high);
        for (int i = 0; i < up(count, AT_ONCE<1>); i += 2) {
            for (int next = i + NEXT; next < i + NEXT + 2; next++) {
                for (int d = 0; d < dim_; d += LINE) {
                    fetch(here_.keys[next] + d);
                    fetch(here_.values[next] + d);
                }
            }
            const bool is_first = i < count, is_second = i + 1 < count;
            const Bf16 *key = is_first ? here_.keys[i] : NO_TOKEN, *next_key = is_second ? here_.keys[i + 1] : NO_TOKEN;
            const Bf16 *value = is_first ? here_.values[i] : NO_TOKEN, *next_value = is_second ? here_.values[i + 1] : NO_TOKEN;
            for (int d = 0; d < dim_; d += LINE) {
                _mm512_store_si512(keys_.data() + size_t(i) * dim_ + d, _mm512_loadu_si512(key + d));
                _mm512_store_si512(keys_.data() + size_t(i + 1) * dim_ + d, _mm512_loadu_si512(next_key + d));
                pair_up(value + d, next_value + d, values_.data() + size_t(i) / 2 * dim_ + d);
            }
        }
    }

    // Of the panel whose first lane this is: [dim / 2, its lanes], [dim, its lanes].
    uint32_t* queries_of(int lane) const { return queries_.data() + size_t(lane) * (dim_ / 2); }
    float* sums_of(int lane) const { return sums_.data() + size_t(lane) * dim_; }

    // The panel of C vectors from `lane` on, over the tokens [begin, end).
    template <int C>
    void add(int lane, int begin, int end, float factor) {
        constexpr int WIDTH = C * LANES;
        const auto [least_low, most_low] = std::minmax_element(low_ + lane, low_ + lane + WIDTH);
        const auto [least_high, most_high] = std::minmax_element(high_ + lane, high_ + lane + WIDTH);
        const int count = std::min(end, *most_high) - begin;
        if (count <= 0 || end <= *least_low) return;  // nobody sees any of them
        alignas(64) float keep[WIDTH];
        multiply_some<From::ZERO, C>(scores_.data(), WIDTH, {tokens_, 2}, up(count, AT_ONCE<C>), {queries_of(lane), WIDTH}, dim_ / 2);
        if (begin >= *most_low && begin + count <= *least_high) {
            weigh<C, true>(lane, begin, count, factor, keep);
        } else {
            weigh<C, false>(lane, begin, count, factor, keep);
        }
        multiply_some<From::KEPT, C>(sums_of(lane), WIDTH, {features_, 2 * dim_}, dim_, {weights_.data(), WIDTH}, (count + 1) / 2, keep);
    }

    // Scores become weights, as by `soften` of online_softmax.h, each lane for itself and two tokens a word, rounded; their total is not. SEE_ALL: of
    // these tokens every lane sees every one. keep: the factors for the old sums.
    template <int C, bool SEE_ALL>
    void weigh(int lane, int begin, int count, float factor, float* keep) {
        const __m512 by = _mm512_set1_ps(factor), never = _mm512_set1_ps(NEVER);
        const auto is_seen = [&](int c, int i) {
            const __m512i index = _mm512_set1_epi32(begin + i);
            return __mmask16(
                _mm512_cmpge_epi32_mask(index, _mm512_load_si512(low_ + lane + c * LANES)) &
                _mm512_cmplt_epi32_mask(index, _mm512_load_si512(high_ + lane + c * LANES)));
        };
        const float* scores = scores_.data();
        uint32_t* weights = weights_.data();
        const auto score = [&](int c, int i) { return _mm512_load_ps(scores + (i * C + c) * LANES); };
        __m512 top[C], sum[C];
        for (int c = 0; c < C; c++) {
            top[c] = _mm512_load_ps(most_ + lane + c * LANES);
            sum[c] = _mm512_setzero_ps();
        }
        for (int i = 0; i < count; i++)
            for (int c = 0; c < C; c++)
                top[c] = _mm512_max_ps(top[c], _mm512_mask_mul_ps(never, SEE_ALL ? __mmask16(0xffff) : is_seen(c, i), score(c, i), by));
        for (int c = 0; c < C; c++) {
            float* most = most_ + lane + c * LANES;
            _mm512_store_ps(keep + c * LANES, exp2_lanes(_mm512_sub_ps(_mm512_load_ps(most), top[c])));
            _mm512_store_ps(most, top[c]);
        }
        const auto weight = [&](int c, int i) {
            const __m512 value = weight_of(score(c, i), by, top[c]);
            return SEE_ALL ? value : _mm512_maskz_mov_ps(is_seen(c, i), value);
        };
        alignas(64) static const uint16_t in_turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i order = _mm512_load_si512(in_turns);
        for (int i = 0; i < count; i += 2) {
            for (int c = 0; c < C; c++) {
                const __m512 a = weight(c, i), b = i + 1 < count ? weight(c, i + 1) : _mm512_setzero_ps();
                sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(a, b));
                const __m512i both = __m512i(_mm512_cvtne2ps_pbh(b, a));
                _mm512_store_si512(weights + (i / 2 * C + c) * LANES, _mm512_permutexvar_epi16(order, both));
            }
        }
        for (int c = 0; c < C; c++) {
            float* total = total_ + lane + c * LANES;
            _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), _mm512_load_ps(keep + c * LANES), sum[c]));
        }
    }

    void finish(Running& run, int num_rows) const {
        std::copy(most_, most_ + num_rows, run.most.begin());
        std::copy(total_, total_ + num_rows, run.total.begin());
        each_stretch(width_, [&](auto vectors, int first) {
            constexpr int WIDTH = decltype(vectors)::value * LANES;
            for (int lane = 0; lane < WIDTH; lane += LANES) {
                for (int d = 0; d < dim_; d += LANES) {
                    __m512i r[LANES];
                    for (int i = 0; i < LANES; i++) r[i] = _mm512_load_si512(sums_of(first) + size_t(d + i) * WIDTH + lane);
                    transpose_words(r);
                    for (int i = 0, row = first + lane; i < LANES && row < num_rows; i++, row++)
                        _mm512_storeu_si512(&run.sums[size_t(row) * dim_ + d], r[i]);
                }
            }
        });
    }

    int dim_ = 0, width_ = 0;             // of a head; lanes in all, a multiple of 16
    Lines<uint32_t> queries_;             // panel by panel, see `queries_of`
    Lines<float> sums_;                   // likewise
    Lines<Bf16> keys_;                    // [PAIR_TOKENS, dim]
    Lines<uint32_t> values_;              // [PAIR_TOKENS / 2, dim]
    const Bf16* tokens_[PAIR_TOKENS];     // rows of keys_
    const Bf16* features_[MAX_PAIR_DIM];  // columns of values_
    Lines<float> scores_{size_t(PAIR_TOKENS) * 4 * LANES};
    Lines<uint32_t> weights_{size_t(PAIR_TOKENS / 2) * 4 * LANES};
    Places here_;
    alignas(64) int32_t low_[MAX_ROWS], high_[MAX_ROWS];
    alignas(64) float most_[MAX_ROWS], total_[MAX_ROWS];
};

}  // namespace baton

#endif
