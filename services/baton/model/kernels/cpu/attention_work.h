// Plans the attention of a step: tiles of query rows, and splits of their KV if there are idle threads.
#pragma once

#include "attention.h"
#include "attention_decode_float.h"
#include "attention_decode_bf16.h"
#include "parallel_for.h"

namespace baton {

constexpr int MIN_SPLIT_TOKENS = 256;  // minimum KV tokens of a split
constexpr int MAX_HEADS = 128;  // query heads per tile
constexpr int MIN_TILE_ROWS = 64;  // lower bound when tiles are made smaller to give every thread a few
constexpr int TILES_PER_THREAD = 4;

// A tile or one split of it: tokens [token_begin, token_end) of a sequence, query heads [head_begin,
// head_end) of one KV head, over `range` of its KV.
struct WorkItem {
    int seq, kv_head, head_begin, head_end, token_begin, token_end;
    KvRange range;
    int split, num_splits, first_split;  // the states of a tile's splits are adjacent, from first_split on
};

template <typename T>
struct AttentionPlan {
    const AttentionArgs& args;
    int group, heads_per_tile, tokens_per_tile;
    std::vector<WorkItem> items;
    int num_split_states = 0;

    // `max_rows`: rows per tile, at most MAX_ROWS.
    AttentionPlan(const AttentionArgs& given, int max_rows) : args(given), group(given.num_heads / given.num_kv_heads) {
        // Too many heads per KV head are divided evenly.
        const int splits = (group + MAX_HEADS - 1) / MAX_HEADS;
        heads_per_tile = (group + splits - 1) / splits;
        // A tile reads the KV of its tokens once, so larger tiles read less KV again.
        const int wanted = args.num_threads == 1 ? 1 : TILES_PER_THREAD * args.num_threads;
        int num_tiles = set_tile_rows(max_rows);
        for (int rows = max_rows / 2; num_tiles < wanted && rows >= MIN_TILE_ROWS; rows /= 2)
            num_tiles = set_tile_rows(rows);
        // Long tiles first, so that no thread starts one at the end.
        for (int s = 0; s < args.num_seqs; s++) plan(s, num_tiles);
        std::stable_sort(items.begin(), items.end(),
            [](const WorkItem& a, const WorkItem& b) { return cost(a) > cost(b); });
    }

    // Sets the tile size to that many rows, at least one token, and returns the number of tiles.
    int set_tile_rows(int rows) {
        tokens_per_tile = std::max(1, rows / heads_per_tile);
        int tiles_per_head = 0;
        for (int s = 0; s < args.num_seqs; s++)
            tiles_per_head += (num_tokens(s) + tokens_per_tile - 1) / tokens_per_tile;
        return tiles_per_head * ((group + heads_per_tile - 1) / heads_per_tile) * args.num_kv_heads;
    }

    int num_tokens(int seq) const { return args.token_begin[seq + 1] - args.token_begin[seq]; }
    static int64_t cost(const WorkItem& item) {
        return int64_t(item.token_end - item.token_begin) * (item.range.end - item.range.begin);
    }

    void plan(int seq, int num_tiles) {
        const int count = num_tokens(seq), before = args.context_len[seq] - count;
        for (int begin = 0; begin < count; begin += tokens_per_tile) {
            const int end = std::min(count, begin + tokens_per_tile);
            const int first_visible = args.window ? std::max(0, before + begin + 1 - args.window) : 0,
                kv_end = before + end;
            const int kv_begin = first_visible / KV_BATCH * KV_BATCH;
            // Number of splits, so that every thread has a few.
            const int wanted = (TILES_PER_THREAD * args.num_threads + num_tiles - 1) / num_tiles;
            const int splits = args.num_threads == 1 ? 1
                : std::clamp(wanted, 1, std::max(1, (kv_end - kv_begin) / MIN_SPLIT_TOKENS));
            const int step = round_up((kv_end - kv_begin + splits - 1) / splits, BF16_LANES);
            for (int head = 0; head < args.num_heads;) {
                const int kv_head = head / group, head_end = std::min(head + heads_per_tile, (kv_head + 1) * group);
                const int num_splits = (kv_end - kv_begin + step - 1) / step;
                for (int split = 0; split < num_splits; split++) {
                    const KvRange range{kv_begin + split * step, std::min(kv_end, kv_begin + (split + 1) * step)};
                    items.push_back(WorkItem{seq, kv_head, head, head_end, begin, end, range, split, num_splits,
                        num_split_states});
                }
                if (num_splits > 1) num_split_states += num_splits;
                head = head_end;
            }
        }
    }

    // Row r of a tile is token r / heads and head r % heads of the tile.
    int num_heads(const WorkItem& item) const { return item.head_end - item.head_begin; }
    int num_rows(const WorkItem& item) const { return (item.token_end - item.token_begin) * num_heads(item); }
    int own_token(const WorkItem& item, int row) const { return item.token_begin + row / num_heads(item); }
    int64_t token_of(const WorkItem& item, int row) const { return args.token_begin[item.seq] + own_token(item, row); }
    int64_t head_of(const WorkItem& item, int row) const { return item.head_begin + row % num_heads(item); }
};

// S: type of the stored keys and values. `tables`: of the layer, instead of those in AttentionArgs.
template <typename S, typename T, typename Kernel>
void run_work_item(const AttentionPlan<T>& plan, const LayerKv& layer_kv, const int32_t* tables, const WorkItem& item,
    Kernel& kernel, SoftmaxState& state) {
    const AttentionArgs& args = plan.args;
    const int rows = plan.num_rows(item), before = args.context_len[item.seq] - plan.num_tokens(item.seq);
    const T* queries[MAX_ROWS];
    KvRange visible[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        queries[r] = static_cast<const T*>(args.q) + plan.token_of(item, r) * args.q_token_stride
            + plan.head_of(item, r) * args.q_head_stride;
        const int own = before + plan.own_token(item, r);
        visible[r] = KvRange{args.window ? std::max(0, own + 1 - args.window) : 0, own + 1};
    }
    const KvRows<S> kv(layer_kv, args.kv_strides, item.kv_head, tables + args.table_begin[item.seq],
        args.block_size, args.head_dim, visible[0].begin);
    state.start(rows, args.head_dim);
    kernel.attend(queries, rows, visible, kv, item.range, args.scale * LOG2_E, state);
}

// Factor of a row's weighted values if its softmax has a sink. A sink may be far above all scores.
inline float factor_with_sink(const SoftmaxState& state, int row, float sink) {
    const float score = sink * LOG2_E, top = std::max(state.row_max[row], score);
    const float scale = std::exp2(state.row_max[row] - top);
    return scale / (state.row_sum[row] * scale + std::exp2(score - top));
}

// Writes the rows of a tile. `sinks` as in AttentionArgs.
template <typename T>
void write_output(const AttentionPlan<T>& plan, const WorkItem& item, const SoftmaxState& state, const float* sinks) {
    const AttentionArgs& args = plan.args;
    for (int r = 0; r < plan.num_rows(item); r++) {
        T* out = static_cast<T*>(args.out) + plan.token_of(item, r) * args.out_token_stride
            + plan.head_of(item, r) * args.out_head_stride;
        const float by = sinks ? factor_with_sink(state, r, sinks[plan.head_of(item, r)]) : 1.0f / state.row_sum[r];
        for (int d = 0; d < args.head_dim; d++)
            out[d] = from_float<T>(state.weighted_values[size_t(r) * args.head_dim + d] * by);
    }
}

// Combines the states of a tile's splits into one.
inline void combine(std::vector<SoftmaxState>& splits, const WorkItem& item, SoftmaxState& combined, int rows,
    int dim) {
    combined.start(rows, dim);
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < item.num_splits; p++)
            combined.row_max[r] = std::max(combined.row_max[r], splits[item.first_split + p].row_max[r]);
        for (int p = 0; p < item.num_splits; p++) {
            const SoftmaxState& split = splits[item.first_split + p];
            const float by = std::exp2(split.row_max[r] - combined.row_max[r]);
            combined.row_sum[r] += split.row_sum[r] * by;
            for (int d = 0; d < dim; d++)
                combined.weighted_values[size_t(r) * dim + d] += split.weighted_values[size_t(r) * dim + d] * by;
        }
    }
}

constexpr size_t NUM_ATTENTION_LOOPS = 2;

// All threads of the team call it. `kv`, `tables`, `sinks`: of this layer, as in AttentionArgs. `splits`: shared by
// the team, at least num_split_states elements.
template <typename T, typename Kernel>
void attend(TeamThread& team, const AttentionPlan<T>& plan, const LayerKv& kv, const int32_t* tables,
    const float* sinks, std::vector<SoftmaxState>& splits) {
    thread_local Kernel kernel;
    thread_local SoftmaxState state;
    const auto num_items = int64_t(plan.items.size());
    team.parallel_for(num_items, [&](int64_t i) {
        const WorkItem& item = plan.items[i];
        SoftmaxState& target = item.num_splits > 1 ? splits[item.first_split + item.split] : state;
        if (kv.is_quantized()) {
            run_work_item<int8_t>(plan, kv, tables, item, kernel, target);
        } else {
            run_work_item<T>(plan, kv, tables, item, kernel, target);
        }
        if (item.num_splits == 1) write_output(plan, item, state, sinks);
    });
    team.parallel_for(plan.num_split_states ? num_items : 0, [&](int64_t i) {
        const WorkItem& item = plan.items[i];
        if (item.num_splits == 1 || item.split) return;
        combine(splits, item, state, plan.num_rows(item), plan.args.head_dim);
        write_output(plan, item, state, sinks);
    });
}

}  // namespace baton
