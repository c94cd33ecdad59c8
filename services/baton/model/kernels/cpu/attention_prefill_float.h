// Computes many query rows in floats, in blocks of one or two vectors. A lane is a row, so no sum crosses
// lanes, and keys and values keep their order. Each number of a key or value is multiplied by a vector of
// queries or weights.
#pragma once

#include <type_traits>

#include "simd.h"
#include "online_softmax.h"

namespace baton {

// sums [R, V vectors] += left [R, depth] x right [depth, V vectors]. Numbers of left are `row_step` and
// `step` apart.
template <int R, int V>
inline void multiply_add_rows(float* sums, const float* left, int row_step, int step, const float* right, int depth) {
    FloatVec acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load_vector<FloatVec>(sums + (r * V + v) * VECTOR_FLOATS);
    for (int p = 0; p < depth; p++) {
        FloatVec lanes[V];
        for (int v = 0; v < V; v++) lanes[v] = load_vector<FloatVec>(right + (p * V + v) * VECTOR_FLOATS);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) acc[r][v] += lanes[v] * left[size_t(r) * row_step + size_t(p) * step];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + (r * V + v) * VECTOR_FLOATS, acc[r][v]);
}

template <int V>
inline void multiply_add(float* sums, int rows, const float* left, int row_step, int step, const float* right,
    int depth) {
    // Numbers of rows. 12 sums hide the latency of an addition and fit into 16 registers.
    constexpr int MOST = 12 / V, SOME = 4 / V;
    int r = 0;
    const auto add = [&](auto at_once) {
        constexpr int R = decltype(at_once)::value;
        for (; r + R <= rows; r += R)
            multiply_add_rows<R, V>(sums + r * V * VECTOR_FLOATS, left + size_t(r) * row_step, row_step, step, right,
                depth);
    };
    add(std::integral_constant<int, MOST>());
    add(std::integral_constant<int, SOME>());
    add(std::integral_constant<int, 1>());
}

// A block of ROWS query rows. A lane without a row sees nothing.
template <int ROWS>
struct RowBlock {
    int32_t kv_begin[ROWS] = {}, kv_end[ROWS] = {};
    float row_max[ROWS], row_sum[ROWS] = {};
    KvRange range{0, 0};  // union of the rows' ranges

    RowBlock() { std::fill(row_max, row_max + ROWS, MASKED_SCORE); }

    void set(int lane, KvRange visible) {
        kv_begin[lane] = visible.begin;
        kv_end[lane] = visible.end;
        range.begin = lane ? std::min(range.begin, visible.begin) : visible.begin;
        range.end = std::max(range.end, visible.end);
    }

    // online_softmax_update of online_softmax.h for scores [count, ROWS], each lane separately. `rescale`:
    // the factors for the earlier sums.
    void online_softmax_update(float* scores, int begin, int count, float factor, float* rescale) {
        float new_max[ROWS], sum[ROWS] = {};
        std::memcpy(new_max, row_max, sizeof new_max);
        for (int i = 0; i < count; i++) {
            float* row = scores + i * ROWS;
#pragma omp simd
            for (int l = 0; l < ROWS; l++) {
                row[l] = ((begin + i >= kv_begin[l]) & (begin + i < kv_end[l])) ? row[l] * factor : MASKED_SCORE;
                new_max[l] = row[l] > new_max[l] ? row[l] : new_max[l];
            }
        }
        for (int l = 0; l < ROWS; l++) {
            rescale[l] = fast_exp2(row_max[l] - new_max[l]);
            row_max[l] = new_max[l];
        }
        for (int i = 0; i < count; i++) {
            float* row = scores + i * ROWS;
#pragma omp simd
            for (int l = 0; l < ROWS; l++) {
                row[l] = row[l] <= MASKED_SCORE ? 0.0f : fast_exp2(row[l] - new_max[l]);
                sum[l] += row[l];
            }
        }
        for (int l = 0; l < ROWS; l++) row_sum[l] = row_sum[l] * rescale[l] + sum[l];
    }
};

// All rows of a tile, in blocks of V vectors.
template <int V>
class PrefillAttentionFloat {
   public:
    template <typename T>
    void start(const T* const* rows, int num_rows, const KvRange* visible, int dim) {
        const int num_blocks = (num_rows + ROWS - 1) / ROWS;
        dim_ = dim;
        row_blocks_.assign(num_blocks, {});
        queries_.assign(size_t(num_blocks) * dim * ROWS, 0.0f);
        sums_.assign(queries_.size(), 0.0f);
        scores_.resize(KV_TILE * ROWS);
        for (int r = 0; r < num_rows; r++) {
            row_blocks_[r / ROWS].set(r % ROWS, visible[r]);
            for (int d = 0; d < dim; d++) queries_[lane_offset(r) + d * ROWS] = to_float(rows[r][d]);
        }
    }

    // keys, values: rows of `width` floats of the tokens [begin, end), at most KV_TILE.
    void add(const float* keys, const float* values, int width, int begin, int end, float factor) {
        for (size_t p = 0; p < row_blocks_.size(); p++) {
            RowBlock<ROWS>& block = row_blocks_[p];
            const int kv_begin = std::max(begin, block.range.begin), count = std::min(end, block.range.end) - kv_begin;
            if (count <= 0) continue;
            float rescale[ROWS];
            float *scores = scores_.data(), *sums = &sums_[p * dim_ * ROWS];
            std::fill(scores, scores + count * ROWS, 0.0f);
            multiply_add<V>(scores, count, keys + size_t(kv_begin - begin) * width, width, 1,
                &queries_[p * dim_ * ROWS], dim_);
            block.online_softmax_update(scores, kv_begin, count, factor, rescale);
            for (int d = 0; d < dim_; d++)
                for (int l = 0; l < ROWS; l++) sums[d * ROWS + l] *= rescale[l];
            multiply_add<V>(sums, dim_, values + size_t(kv_begin - begin) * width, 1, width, scores, count);
        }
    }

    void end(SoftmaxState& state, int num_rows) const {
        for (int r = 0; r < num_rows; r++) {
            state.row_max[r] = row_blocks_[r / ROWS].row_max[r % ROWS];
            state.row_sum[r] = row_blocks_[r / ROWS].row_sum[r % ROWS];
            for (int d = 0; d < dim_; d++) state.weighted_values[size_t(r) * dim_ + d]
                = sums_[lane_offset(r) + d * ROWS];
        }
    }

   private:
    static constexpr int ROWS = V * VECTOR_FLOATS;

    // Offset of a row's first number in queries_ and sums_, [blocks, dim, ROWS].
    size_t lane_offset(int row) const { return size_t(row / ROWS) * dim_ * ROWS + row % ROWS; }

    int dim_ = 0;
    std::vector<RowBlock<ROWS>> row_blocks_;
    std::vector<float> queries_, scores_, sums_;
};

}  // namespace baton
