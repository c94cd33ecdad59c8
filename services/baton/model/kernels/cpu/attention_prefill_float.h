// Query rows in panels of one or two vectors: a lane is a row, so that no sum runs across lanes, and neither keys nor values need another
// order. Their numbers are multiplied one by one by vectors of queries, or of weights.
#pragma once

#include <type_traits>

#include "simd.h"
#include "online_softmax.h"

namespace baton {

// sums [R, V vectors] += left [R, depth] x right [depth, V vectors]; left's numbers are `row_step` and `step` apart.
template <int R, int V>
inline void add_some_products(float* sums, const float* left, int row_step, int step, const float* right, int depth) {
    Floats held[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) held[r][v] = vector_at<Floats>(sums + (r * V + v) * LANE_FLOATS);
    for (int p = 0; p < depth; p++) {
        Floats lanes[V];
        for (int v = 0; v < V; v++) lanes[v] = vector_at<Floats>(right + (p * V + v) * LANE_FLOATS);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) held[r][v] += lanes[v] * left[size_t(r) * row_step + size_t(p) * step];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + (r * V + v) * LANE_FLOATS, held[r][v]);
}

template <int V>
inline void add_products(float* sums, int rows, const float* left, int row_step, int step, const float* right, int depth) {
    constexpr int MOST = 12 / V, SOME = 4 / V;  // rows; 12 sums hide what an addition takes, and fit into 16 registers
    int r = 0;
    const auto add = [&](auto at_once) {
        constexpr int R = decltype(at_once)::value;
        for (; r + R <= rows; r += R)
            add_some_products<R, V>(sums + r * V * LANE_FLOATS, left + size_t(r) * row_step, row_step, step, right, depth);
    };
    add(std::integral_constant<int, MOST>());
    add(std::integral_constant<int, SOME>());
    add(std::integral_constant<int, 1>());
}

// So many rows; a lane without a row sees nothing.
template <int ROWS>
struct Panel {
    int32_t low[ROWS] = {}, high[ROWS] = {};
    float most[ROWS], total[ROWS] = {};
    Limits range{0, 0};  // seen by any of them

    Panel() { std::fill(most, most + ROWS, NEVER); }

    void set(int lane, Limits seen) {
        low[lane] = seen.low;
        high[lane] = seen.high;
        range.low = lane ? std::min(range.low, seen.low) : seen.low;
        range.high = std::max(range.high, seen.high);
    }

    // As `soften` of online_softmax.h, of scores [count, ROWS], each lane for itself. `keep`: the factors for the old sums.
    void soften(float* scores, int begin, int count, float factor, float* keep) {
        float top[ROWS], sum[ROWS] = {};
        std::memcpy(top, most, sizeof top);
        for (int i = 0; i < count; i++) {
            float* row = scores + i * ROWS;
#pragma omp simd
            for (int l = 0; l < ROWS; l++) {
                row[l] = ((begin + i >= low[l]) & (begin + i < high[l])) ? row[l] * factor : NEVER;
                top[l] = row[l] > top[l] ? row[l] : top[l];
            }
        }
        for (int l = 0; l < ROWS; l++) {
            keep[l] = exp2_near(most[l] - top[l]);
            most[l] = top[l];
        }
        for (int i = 0; i < count; i++) {
            float* row = scores + i * ROWS;
#pragma omp simd
            for (int l = 0; l < ROWS; l++) {
                row[l] = row[l] <= NEVER ? 0.0f : exp2_near(row[l] - top[l]);
                sum[l] += row[l];
            }
        }
        for (int l = 0; l < ROWS; l++) total[l] = total[l] * keep[l] + sum[l];
    }
};

// All rows of a tile, in panels of V vectors.
template <int V>
class Panels {
   public:
    template <typename T>
    void start(const T* const* rows, int num_rows, const Limits* seen, int dim) {
        const int num_panels = (num_rows + ROWS - 1) / ROWS;
        dim_ = dim;
        panels_.assign(num_panels, {});
        queries_.assign(size_t(num_panels) * dim * ROWS, 0.0f);
        sums_.assign(queries_.size(), 0.0f);
        scores_.resize(KV_TILE * ROWS);
        for (int r = 0; r < num_rows; r++) {
            panels_[r / ROWS].set(r % ROWS, seen[r]);
            for (int d = 0; d < dim; d++) queries_[lane_of(r) + d * ROWS] = to_float(rows[r][d]);
        }
    }

    // keys, values: rows of `width` floats, of the tokens [begin, end), at most KV_TILE.
    void add(const float* keys, const float* values, int width, int begin, int end, float factor) {
        for (size_t p = 0; p < panels_.size(); p++) {
            Panel<ROWS>& panel = panels_[p];
            const int low = std::max(begin, panel.range.low), count = std::min(end, panel.range.high) - low;
            if (count <= 0) continue;
            float keep[ROWS];
            float *scores = scores_.data(), *sums = &sums_[p * dim_ * ROWS];
            std::fill(scores, scores + count * ROWS, 0.0f);
            add_products<V>(scores, count, keys + size_t(low - begin) * width, width, 1, &queries_[p * dim_ * ROWS], dim_);
            panel.soften(scores, low, count, factor, keep);
            for (int d = 0; d < dim_; d++)
                for (int l = 0; l < ROWS; l++) sums[d * ROWS + l] *= keep[l];
            add_products<V>(sums, dim_, values + size_t(low - begin) * width, 1, width, scores, count);
        }
    }

    void end(Running& run, int num_rows) const {
        for (int r = 0; r < num_rows; r++) {
            run.most[r] = panels_[r / ROWS].most[r % ROWS];
            run.total[r] = panels_[r / ROWS].total[r % ROWS];
            for (int d = 0; d < dim_; d++) run.sums[size_t(r) * dim_ + d] = sums_[lane_of(r) + d * ROWS];
        }
    }

   private:
    static constexpr int ROWS = V * LANE_FLOATS;

    // Of a row's first number in queries_ and sums_, [panels, dim, ROWS].
    size_t lane_of(int row) const { return size_t(row / ROWS) * dim_ * ROWS + row % ROWS; }

    int dim_ = 0;
    std::vector<Panel<ROWS>> panels_;
    std::vector<float> queries_, scores_, sums_;
};

}  // namespace baton
