// Attention tiles of any type, computed in floats. Many rows, as in prefill, are computed by
// attention_prefill_float.h. Few rows, as in decode, go one after the other with a lane per feature.
#pragma once

#include "attention_prefill_float.h"
#include "simd.h"
#include "online_softmax.h"

namespace baton {

constexpr int DECODE_MAX_ROWS = 2;  // for more, the prefill code is faster
constexpr int DECODE_BATCH_TOKENS = 32;  // tokens; their keys and values, as floats, fit into the L1 cache

// Adds halves pairwise: a loop over lanes would go through memory one by one.
inline float sum_of(FloatVec vector) {
    float lanes[VECTOR_FLOATS];
    store(lanes, vector);
    for (int half = VECTOR_FLOATS / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

// size: a multiple of VECTOR_FLOATS.
inline float dot(const float* a, const float* b, int size) {
    FloatVec sum = {};
    for (int i = 0; i < size; i += VECTOR_FLOATS) sum += load_vector<FloatVec>(a + i) * load_vector<FloatVec>(b + i);
    return sum_of(sum);
}

template <typename T>
class AttentionTileFloat {
   public:
    // The state of this many rows, as floats, fits into the L2 cache even with large heads.
    static constexpr int MAX_TILE_ROWS = 128;

    // kv_end: the end of the KV that is read afterwards, and prefetched meanwhile.
    template <typename S>
    void attend(const T* const* rows, int num_rows, const KvRange* visible, const KvRows<S>& kv, KvRange range,
        int kv_end, float factor, SoftmaxState& state) {
        width_ = round_up(kv.head_dim, VECTOR_FLOATS);
        if (num_rows <= DECODE_MAX_ROWS)
            return attend_decode(rows, num_rows, visible, kv, range, kv_end, factor, state);
        if (num_rows <= VECTOR_FLOATS)
            return attend_prefill(narrow_, rows, num_rows, visible, kv, range, kv_end, factor, state);
        attend_prefill(wide_, rows, num_rows, visible, kv, range, kv_end, factor, state);
    }

   private:
    template <typename RowBlocks, typename S>
    void attend_prefill(
        RowBlocks& row_blocks,
        const T* const* rows,
        int num_rows,
        const KvRange* visible,
        const KvRows<S>& kv,
        KvRange range,
        int kv_end,
        float factor,
        SoftmaxState& state) {
        row_blocks.start(rows, num_rows, visible, kv.head_dim);
        for (int begin = range.begin, end; begin < range.end; begin = end) {
            end = std::min(next_multiple(begin, KV_TILE), range.end);
            convert(kv, begin, end, kv_end - 1);
            row_blocks.add(keys_.data(), values_.data(), width_, begin, end, factor);
        }
        row_blocks.end(state, num_rows);
    }

    template <typename S>
    void attend_decode(const T* const* rows, int num_rows, const KvRange* visible, const KvRows<S>& kv,
        KvRange range, int kv_end, float factor, SoftmaxState& state) {
        const int dim = kv.head_dim;
        queries_.assign(size_t(num_rows) * width_, 0.0f);
        for (int r = 0; r < num_rows; r++)
            for (int d = 0; d < dim; d++) queries_[size_t(r) * width_ + d] = to_float(rows[r][d]);
        for (int begin = range.begin; begin < range.end; begin += DECODE_BATCH_TOKENS) {
            const int end = std::min(begin + DECODE_BATCH_TOKENS, range.end), count = end - begin;
            convert(kv, begin, end, kv_end - 1);
            for (int r = 0; r < num_rows; r++) {
                float scores[DECODE_BATCH_TOKENS];
                for (int i = 0; i < count; i++) scores[i]
                    = dot(&queries_[size_t(r) * width_], &keys_[size_t(i) * width_], width_);
                const float rescale = online_softmax_update(scores, begin, count, visible[r], factor,
                    state.row_max[r], state.row_sum[r]);
                add_values(&state.weighted_values[size_t(r) * dim], rescale, scores, count, dim);
            }
        }
    }

    // sums [dim] = sums * rescale + weights [count] x values. Four tokens at a time, because each pass reads
    // and writes the sums.
    void add_values(float* sums, float rescale, const float* weights, int count, int dim) const {
        for (int d = 0; d < dim; d++) sums[d] *= rescale;
        int i = 0;
        for (; i + 4 <= count; i += 4) {
            const float* w = weights + i;
            const float *a = &values_[size_t(i) * width_], *b = a + width_, *c = b + width_, *e = c + width_;
            for (int d = 0; d < dim; d++) sums[d] += w[0] * a[d] + w[1] * b[d] + w[2] * c[d] + w[3] * e[d];
        }
        for (; i < count; i++)
            for (int d = 0; d < dim; d++) sums[d] += weights[i] * values_[size_t(i) * width_ + d];
    }

    // Converts the tokens' keys and values to floats, [end - begin, width_], padded with zeros. Those before
    // `kv.first` are zero. Meanwhile it prefetches tokens that are PREFETCH_TOKENS further, up to `last`.
    template <typename S>
    void convert(const KvRows<S>& kv, int begin, int end, int last) {
        const int dim = kv.head_dim;
        keys_.resize(size_t(KV_TILE) * width_);
        values_.resize(keys_.size());
        [[maybe_unused]] float key_scales[KV_TILE], value_scales[KV_TILE];
        if constexpr (KvRows<S>::HAS_SCALES) kv.token_scales(begin, end, last + 1, key_scales, value_scales);
        const int first = std::clamp(kv.first, begin, end);
        const size_t skipped = size_t(first - begin) * width_;
        std::fill(keys_.begin(), keys_.begin() + skipped, 0.0f);
        std::fill(values_.begin(), values_.begin() + skipped, 0.0f);
        for (int i = first; i < end; i++) {
            const S *key = kv.key(i), *value = key + kv.v_offset, *ahead = kv.key(std::min(i + PREFETCH_TOKENS, last));
            for (int d = 0; d < dim; d += CACHE_LINE_BYTES / int(sizeof(S))) {
                __builtin_prefetch(ahead + d);
                __builtin_prefetch(ahead + kv.v_offset + d);
            }
            float *to_key = &keys_[size_t(i - begin) * width_], *to_value = &values_[size_t(i - begin) * width_];
            if constexpr (KvRows<S>::HAS_SCALES) {
                const float key_scale = key_scales[i - begin], value_scale = value_scales[i - begin];
                for (int d = 0; d < dim; d++) to_key[d] = to_float(key[d]) * key_scale;
                for (int d = 0; d < dim; d++) to_value[d] = to_float(value[d]) * value_scale;
            } else {
                for (int d = 0; d < dim; d++) to_key[d] = to_float(key[d]);
                for (int d = 0; d < dim; d++) to_value[d] = to_float(value[d]);
            }
            for (int d = dim; d < width_; d++) to_key[d] = 0.0f;
        }
    }

    int width_ = 0;  // floats per row, a multiple of the vector size
    PrefillAttentionFloat<1> narrow_;
    PrefillAttentionFloat<2> wide_;
    std::vector<float> keys_, values_, queries_;
};

}  // namespace baton
