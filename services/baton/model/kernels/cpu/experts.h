// A layer's mixture of experts: routes each row to a few experts, and multiplies the rows of all experts in one
// parallel loop for each of their two products.
#pragma once

#include <optional>
#include <vector>

#include "layers.h"
#include "linear.h"

namespace baton {

constexpr int MAX_EXPERTS = 1024;
constexpr int64_t EXPERT_LOOPS = 5 + 3 * GEMM_LOOPS;

// How a router turns its logits into the weights of the chosen experts.
//   SOFTMAX_ALL: softmax over all experts, then the largest.
//   SOFTMAX_CHOSEN: the largest, then softmax over them. This equals SOFTMAX_ALL, divided by its sum.
enum RouterWeights : int32_t { SOFTMAX_ALL = 0, SOFTMAX_CHOSEN = 1 };

// How the rows of one layer are distributed to experts. It is shared by the team and changes from layer to layer, as
// may the number of experts: vectors may be longer than a layer needs.
// Only the items of a loop may read it, not the number of items: a thread that was preempted before a loop must
// find the loop's end even if the others are layers ahead.
struct Routing {
    std::vector<int32_t> experts;  // [rows, top_k]
    std::vector<float> weights;    // [rows, top_k]
    std::vector<int64_t> places;   // [rows, top_k]: the row's place among the rows grouped by expert
    std::vector<int64_t> sources;  // [rows * top_k]: the row at each place
    std::vector<int64_t> begins;   // [num_experts + 1]: the first place of each expert, then the end
    std::vector<int64_t> blocks;   // [num_experts + 1]: the first block of rows of each expert, then the end

    // Makes room for a layer.
    void reserve(int64_t rows, int top_k, int num_experts) {
        const auto grow = [](auto& numbers, int64_t count) {
            numbers.resize(std::max(numbers.size(), size_t(count)));
        };
        grow(experts, rows * top_k);
        grow(weights, rows * top_k);
        grow(places, rows * top_k);
        grow(sources, rows * top_k);
        grow(begins, num_experts + 1);
        grow(blocks, num_experts + 1);
    }
};

// Chooses the top_k experts of one row; the first of equal ones. A row of NaN gets experts with NaN weights.
inline void choose_experts(const float* logits, int num_experts, int top_k, int32_t kind, int32_t* experts,
    float* weights) {
    bool is_taken[MAX_EXPERTS] = {};
    for (int k = 0; k < top_k; k++) {
        int best = -1;
        for (int e = 0; e < num_experts; e++)
            if (!is_taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        is_taken[best] = true;
        experts[k] = best;
    }
    const float top = logits[experts[0]];
    float sum = 0.0f;
    for (int k = 0; k < top_k; k++) {
        weights[k] = fast_exp2((logits[experts[k]] - top) * LOG2_E);
        sum += weights[k];
    }
    if (kind == SOFTMAX_ALL) {
        sum = 0.0f;
        for (int e = 0; e < num_experts; e++) sum += fast_exp2((logits[e] - top) * LOG2_E);
    }
    for (int k = 0; k < top_k; k++) weights[k] /= sum;
}

// Index of the last of the first `count` numbers, ascending, that is at most `value`. The first number is.
inline int64_t last_at_most(const std::vector<int64_t>& numbers, int64_t count, int64_t value) {
    return int64_t(std::upper_bound(numbers.begin(), numbers.begin() + count, value) - numbers.begin()) - 1;
}

// Groups rows by expert, each expert's rows ascending.
inline void group_rows(Routing& routing, int64_t rows, int top_k, int num_experts) {
    std::vector<int64_t> next(size_t(num_experts), 0);
    for (int64_t i = 0; i < rows * top_k; i++) next[routing.experts[i]]++;
    routing.begins[0] = routing.blocks[0] = 0;
    for (int e = 0; e < num_experts; e++) {
        routing.begins[e + 1] = routing.begins[e] + next[e];
        routing.blocks[e + 1] = routing.blocks[e] + (next[e] + ROWS_PER_BLOCK - 1) / ROWS_PER_BLOCK;
        next[e] = routing.begins[e];
    }
    for (int64_t i = 0; i < rows * top_k; i++) {
        routing.places[i] = next[routing.experts[i]]++;
        routing.sources[routing.places[i]] = i / top_k;
    }
}

// One product of all experts. Their weights have one shape, each of its own format.
// row_bytes: the largest gemm_row_bytes of an expert.
struct ExpertsGemmArgs {
    const GemmArgs* experts;
    int64_t row_bytes;
};

// The rows of one expert within x and out of an ExpertsGemmArgs product: a product of its own.
struct ExpertRows {
    const GemmArgs* weights;
    int64_t begin;  // the place of the first row
    int64_t count;

    ExpertRows(const ExpertsGemmArgs& args, const Routing& routing, int64_t expert)
        : weights(args.experts + expert), begin(routing.begins[expert]), count(routing.begins[expert + 1] - begin) {}
};

// out [places, n] = x [places, k], both grouped by expert, each row times the weights of its expert, plus biases.
// scratch: places * row_bytes.
template <typename T>
void multiply_experts(TeamThread& team, const ExpertsGemmArgs& args, const T* x, T* out, int32_t dtype,
    const Routing& routing, int64_t places, int num_experts, void* scratch, int threads) {
    const int64_t panels = total_panels(args.experts[0]), n = args.experts[0].n, k = args.experts[0].k;
    const auto scratch_of = [&](const ExpertRows& rows) {
        return static_cast<uint8_t*>(scratch) + rows.begin * args.row_bytes;
    };
    // The answer must not depend on the routing: it decides how many loops the team runs.
    const bool may_need_scratch = args.row_bytes && std::any_of(args.experts, args.experts + num_experts,
        [&](const GemmArgs& expert) { return gemm_row_bytes(expert, dtype, places) != 0; });
    if (may_need_scratch) {
        team.parallel_for_batched(places, [&](int64_t place) {
            const ExpertRows rows(args, routing, last_at_most(routing.begins, num_experts + 1, place));
            prepare_row(*rows.weights, x + rows.begin * k, dtype, place - rows.begin, rows.count, scratch_of(rows));
        });
    }
    const int64_t max_blocks = places / ROWS_PER_BLOCK + std::min<int64_t>(num_experts, places);
    std::optional<PreparedGemm> prepared;
    int64_t expert = -1;  // of `prepared`; successive items of a thread mostly have one
    team.parallel_for(max_blocks * panels, [&](int64_t item) {
        const int64_t block = item / panels, panel = item % panels, next = panel + threads;
        const int64_t e = last_at_most(routing.blocks, num_experts + 1, block);
        if (e == num_experts) return;  // there are fewer blocks
        const ExpertRows rows(args, routing, e);
        const int64_t first = (block - routing.blocks[e]) * ROWS_PER_BLOCK;
        const int count = int(std::min<int64_t>(ROWS_PER_BLOCK, rows.count - first));
        if (e != expert)
            prepared.emplace(*rows.weights, x + rows.begin * k, dtype, out + rows.begin * n, dtype, rows.count,
                scratch_of(rows));
        expert = e;
        prepared->multiply({first, count, panel, next < panels ? next : -1});
    });
}

// Copies each row of x [rows, size] to its places in `grouped`.
template <typename T>
void scatter_rows(TeamThread& team, const T* x, T* grouped, const Routing& routing, int64_t places, int64_t size) {
    team.parallel_for_batched(places, [&](int64_t place) {
        std::memcpy(grouped + place * size, x + routing.sources[place] * size, size_t(size) * sizeof(T));
    });
}

// out[r] = the sum over the row's experts of weight times the row at its place in `grouped`.
template <typename T>
void gather_rows(TeamThread& team, const T* grouped, T* out, const Routing& routing, int64_t rows, int top_k,
    int64_t size) {
    team.parallel_for_batched(rows, [&](int64_t r) {
        const int64_t* places = &routing.places[r * top_k];
        const float* weights = &routing.weights[r * top_k];
        for (int64_t i = 0; i < size; i++) {
            float sum = 0.0f;
            for (int k = 0; k < top_k; k++) sum += weights[k] * to_float(grouped[places[k] * size + i]);
            out[r * size + i] = from_float<T>(sum);
        }
    });
}

}  // namespace baton
