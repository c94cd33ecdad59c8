// Tiles of any type, in floats: many rows in panels; of few, as of those that decode, one after the other, a lane a feature.
#pragma once

#include "attention_prefill_float.h"
#include "simd.h"
#include "online_softmax.h"

namespace baton {

constexpr int FEW_ROWS = 2;  // for more, a panel is faster
constexpr int FEW_TILE = 32;  // tokens; their keys and values, as floats, stay in the first cache

// Half by half: a loop over lanes would go through memory, one by one.
inline float sum_of(Floats vector) {
    float lanes[LANE_FLOATS];
    store(lanes, vector);
    for (int half = LANE_FLOATS / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

// size: a multiple of LANE_FLOATS.
inline float dot(const float* a, const float* b, int size) {
    Floats sum = {};
    for (int i = 0; i < size; i += LANE_FLOATS) sum += vector_at<Floats>(a + i) * vector_at<Floats>(b + i);
    return sum_of(sum);
}

template <typename T>
class FloatTile {
   public:
    static constexpr int MOST_ROWS = 128;  // what they become stays in the second cache, in floats and with long heads, too

    void attend(const T* const* rows, int num_rows, const Limits* seen, const KvRows<T>& kv, Limits range, float factor, Running& run) {
        width_ = up(kv.head_dim, LANE_FLOATS);
        if (num_rows <= FEW_ROWS) return attend_few(rows, num_rows, seen, kv, range, factor, run);
        if (num_rows <= LANE_FLOATS) return attend_many(narrow_, rows, num_rows, seen, kv, range, factor, run);
        attend_many(wide_, rows, num_rows, seen, kv, range, factor, run);
    }

   private:
    template <typename Panels>
    void attend_many(
        Panels& panels,
        const T* const* rows,
        int num_rows,
        const Limits* seen,
        const KvRows<T>& kv,
        Limits range,
        float factor,
        Running& run) {
        panels.start(rows, num_rows, seen, kv.head_dim);
        for (int begin = range.low; begin < range.high; begin += KV_TILE) {
            const int end = std::min(begin + KV_TILE, range.high);
            convert(kv, begin, end, range.high - 1);
            panels.add(keys_.data(), values_.data(), width_, begin, end, factor);
        }
        panels.end(run, num_rows);
    }

    void attend_few(const T* const* rows, int num_rows, const Limits* seen, const KvRows<T>& kv, Limits range, float factor, Running& run) {
        const int dim = kv.head_dim;
        queries_.assign(size_t(num_rows) * width_, 0.0f);
        for (int r = 0; r < num_rows; r++)
            for (int d = 0; d < dim; d++) queries_[size_t(r) * width_ + d] = to_float(rows[r][d]);
        for (int begin = range.low; begin < range.high; begin += FEW_TILE) {
            const int end = std::min(begin + FEW_TILE, range.high), count = end - begin;
            convert(kv, begin, end, range.high - 1);
            for (int r = 0; r < num_rows; r++) {
                float scores[FEW_TILE];
                for (int i = 0; i < count; i++) scores[i] = dot(&queries_[size_t(r) * width_], &keys_[size_t(i) * width_], width_);
                const float keep = soften(scores, begin, count, seen[r], factor, run.most[r], run.total[r]);
                add_values(&run.sums[size_t(r) * dim], keep, scores, count, dim);
            }
        }
    }

    // sums [dim] = sums * keep + weights [count] x values. Four at a time: sums are read and written again for each.
    void add_values(float* sums, float keep, const float* weights, int count, int dim) const {
        for (int d = 0; d < dim; d++) sums[d] *= keep;
        int i = 0;
        for (; i + 4 <= count; i += 4) {
            const float* w = weights + i;
            const float *a = &values_[size_t(i) * width_], *b = a + width_, *c = b + width_, *e = c + width_;
            for (int d = 0; d < dim; d++) sums[d] += w[0] * a[d] + w[1] * b[d] + w[2] * c[d] + w[3] * e[d];
        }
        for (; i < count; i++)
            for (int d = 0; d < dim; d++) sums[d] += weights[i] * values_[size_t(i) * width_ + d];
    }

    // keys_, values_ [end - begin, width_]: of these tokens, zeros behind each. Meanwhile those AHEAD are fetched, up to `last`.
    void convert(const KvRows<T>& kv, int begin, int end, int last) {
        const int dim = kv.head_dim;
        keys_.resize(size_t(KV_TILE) * width_);
        values_.resize(keys_.size());
        for (int i = begin; i < end; i++) {
            const T *key = kv.key(i), *value = key + kv.v_offset, *ahead = kv.key(std::min(i + AHEAD, last));
            for (int d = 0; d < dim; d += LINE_BYTES / int(sizeof(T))) {
                __builtin_prefetch(ahead + d);
                __builtin_prefetch(ahead + kv.v_offset + d);
            }
            float *to_key = &keys_[size_t(i - begin) * width_], *to_value = &values_[size_t(i - begin) * width_];
            for (int d = 0; d < dim; d++) to_key[d] = to_float(key[d]);
            for (int d = 0; d < dim; d++) to_value[d] = to_float(value[d]);
            for (int d = dim; d < width_; d++) to_key[d] = 0.0f;
        }
    }

    int width_ = 0;  // of a row in floats, from one vector to the next
    Panels<1> narrow_;
    Panels<2> wide_;
    std::vector<float> keys_, values_, queries_;
};

}  // namespace baton
