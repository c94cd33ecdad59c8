// Plans the attention of a step: tiles of query rows, and splits of their KV if there are idle threads.
#pragma once

#include <memory>

#include "attention.h"
#include "attention_decode_float.h"
#include "attention_decode_bf16.h"
#include "parallel_for.h"

namespace baton {

constexpr int MAX_HEADS = 128;  // query heads per tile
constexpr int MIN_TILE_ROWS = 64;  // lower bound when tiles are made smaller to give every thread a few
constexpr int TILES_PER_THREAD = 4;

// A tile or one split of it: tokens [token_begin, token_end) of a sequence, query heads [head_begin,
// head_end) of one KV head, over `range` of its KV. A split has whole segments.
struct WorkItem {
    int seq, kv_head, head_begin, head_end, token_begin, token_end;
    KvRange range;
    int segment_tokens, split, num_splits;
    // Of a tile that is split: place of the state of this split's first segment, and number of the tile's segments.
    int first_state, num_tile_states;
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

    // Number of tokens that the token at this KV index sees.
    int num_visible(int index) const { return args.window ? std::min(index + 1, args.window) : index + 1; }

    void plan(int seq, int num_tiles) {
        const int count = num_tokens(seq), before = args.context_len[seq] - count;
        for (int begin = 0, end; begin < count; begin = end) {
            const int size = segment_tokens(num_visible(before + begin));
            end = std::min(count, begin + tokens_per_tile);
            // All tokens of a tile have segments of one size.
            if (segment_tokens(num_visible(before + end - 1)) != size) end = MAX_SEGMENTS * size - before;
            const int first_visible = before + begin + 1 - num_visible(before + begin), kv_end = before + end;
            const int kv_begin = first_visible / KV_BATCH * KV_BATCH;
            const int first_segment = kv_begin / size, num_segments = (kv_end - 1) / size + 1 - first_segment;
            // Number of splits, so that every thread has a few.
            const int wanted = (TILES_PER_THREAD * args.num_threads + num_tiles - 1) / num_tiles;
            const int splits = args.num_threads == 1 ? 1 : std::min(wanted, num_segments);
            const int step = (num_segments + splits - 1) / splits, num_splits = (num_segments + step - 1) / step;
            for (int head = 0; head < args.num_heads;) {
                const int kv_head = head / group, head_end = std::min(head + heads_per_tile, (kv_head + 1) * group);
                for (int split = 0; split < num_splits; split++) {
                    const int segment = first_segment + split * step;
                    const KvRange range{std::max(kv_begin, segment * size), std::min(kv_end, (segment + step) * size)};
                    items.push_back(WorkItem{seq, kv_head, head, head_end, begin, end, range, size, split, num_splits,
                        num_split_states + split * step, num_segments});
                }
                if (num_splits > 1) num_split_states += num_segments;
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

// What a thread needs for its work items. `state`: of a tile; `later`: of one of its segments.
template <typename Kernel>
struct AttentionScratch {
    Kernel kernel;
    SoftmaxState state, later;

    // The calling thread's own. It is on the heap because the compiler would find the address of a thread_local
    // object anew in the innermost loops, with a call.
    static AttentionScratch& of_thread() {
        thread_local const auto own = std::make_unique<AttentionScratch>();
        return *own;
    }
};

// S: type of the stored keys and values. `tables`: of the layer, instead of those in AttentionArgs. The result is
// `own.state`, or in `split_states` those of the item's segments, if the tile is split.
template <typename S, typename T, typename Kernel>
void run_work_item(const AttentionPlan<T>& plan, const LayerKv& layer_kv, const int32_t* tables, const WorkItem& item,
    AttentionScratch<Kernel>& own, std::vector<SoftmaxState>& split_states) {
    const AttentionArgs& args = plan.args;
    const int rows = plan.num_rows(item), before = args.context_len[item.seq] - plan.num_tokens(item.seq);
    const T* queries[MAX_ROWS];
    KvRange visible[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        queries[r] = static_cast<const T*>(args.q) + plan.token_of(item, r) * args.q_token_stride
            + plan.head_of(item, r) * args.q_head_stride;
        const int index = before + plan.own_token(item, r);
        visible[r] = KvRange{args.window ? std::max(0, index + 1 - args.window) : 0, index + 1};
    }
    const KvRows<S> kv(layer_kv, args.kv_strides, item.kv_head, tables + args.table_begin[item.seq],
        args.block_size, args.head_dim, visible[0].begin);
    int number = 0;
    for (int begin = item.range.begin, end; begin < item.range.end; begin = end, number++) {
        end = std::min(item.range.end, next_multiple(begin, item.segment_tokens));
        SoftmaxState& target
            = item.num_splits > 1 ? split_states[item.first_state + number] : number ? own.later : own.state;
        target.start(rows, args.head_dim);
        own.kernel.attend(queries, rows, visible, kv, {begin, end}, item.range.end, args.scale * LOG2_E, target);
        if (&target == &own.later) own.state.add(own.later);
    }
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

// Combines the states of a tile's segments into one, in the order of a tile that is not split. `item`: its first split.
inline void combine(const std::vector<SoftmaxState>& split_states, const WorkItem& item, SoftmaxState& combined) {
    combined = split_states[item.first_state];
    for (int s = 1; s < item.num_tile_states; s++) combined.add(split_states[item.first_state + s]);
}

constexpr size_t NUM_ATTENTION_LOOPS = 2;

// All threads of the team call it. `kv`, `tables`, `sinks`: of this layer, as in AttentionArgs. `split_states`: shared
// by the team, at least num_split_states elements.
template <typename T, typename Kernel>
void attend(TeamThread& team, const AttentionPlan<T>& plan, const LayerKv& kv, const int32_t* tables,
    const float* sinks, std::vector<SoftmaxState>& split_states) {
    auto& own = AttentionScratch<Kernel>::of_thread();
    const auto num_items = int64_t(plan.items.size());
    team.parallel_for(num_items, [&](int64_t i) {
        const WorkItem& item = plan.items[i];
        if (kv.is_quantized()) {
            run_work_item<int8_t>(plan, kv, tables, item, own, split_states);
        } else {
            run_work_item<T>(plan, kv, tables, item, own, split_states);
        }
        if (item.num_splits == 1) write_output(plan, item, own.state, sinks);
    });
    team.parallel_for(plan.num_split_states ? num_items : 0, [&](int64_t i) {
        const WorkItem& item = plan.items[i];
        if (item.num_splits == 1 || item.split) return;
        combine(split_states, item, own.state);
        write_output(plan, item, own.state, sinks);
    });
}

}  // namespace baton
