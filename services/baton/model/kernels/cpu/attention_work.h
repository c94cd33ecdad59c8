// What attention of a step consists of: tiles of query rows, and parts of them where there are threads to spare.
#pragma once

#include "attention.h"
#include "attention_decode_float.h"
#include "attention_decode_bf16.h"
#include "parallel_for.h"

namespace baton {

constexpr int PART_TOKENS = 256;  // the least stretch of KV that is worth a part of its own
constexpr int MAX_HEADS = 128;  // of a tile
constexpr int LEAST_ROWS = 64;  // of a tile that is made smaller so that every thread has a few
constexpr int TILES_A_THREAD = 4;

// A tile, or one part of one: tokens [token_begin, token_end) of a sequence, by query heads [head_begin, head_end) of one KV head, over the
// range of its KV.
struct Item {
    int seq, kv_head, head_begin, head_end, token_begin, token_end;
    Limits range;
    int part, num_parts, first_part;  // parts of one tile are neighbours in the scratch, from `first_part` on
};

template <typename T>
struct Work {
    const AttentionArgs& args;
    int group, heads_a_tile, tokens_a_tile;
    std::vector<Item> items;
    int num_partial = 0;

    // `most_rows`: of a tile; at most MAX_ROWS.
    Work(const AttentionArgs& given, int most_rows) : args(given), group(given.num_heads / given.num_kv_heads) {
        const int splits = (group + MAX_HEADS - 1) / MAX_HEADS;  // heads of one KV head that are too many are shared out evenly
        heads_a_tile = (group + splits - 1) / splits;
        // A tile goes over the KV of its tokens once: the more tokens, the less is read again.
        const int wanted = args.num_threads == 1 ? 1 : TILES_A_THREAD * args.num_threads;
        int num_tiles = share_out(most_rows);
        for (int rows = most_rows / 2; num_tiles < wanted && rows >= LEAST_ROWS; rows /= 2) num_tiles = share_out(rows);
        // long tiles first, so that no thread is left with one at the end
        for (int s = 0; s < args.num_seqs; s++) plan(s, num_tiles);
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return cost(a) > cost(b); });
    }

    // In tiles of so many rows, or of one token; returns how many.
    int share_out(int rows) {
        tokens_a_tile = std::max(1, rows / heads_a_tile);
        int tiles_a_head = 0;
        for (int s = 0; s < args.num_seqs; s++) tiles_a_head += (num_tokens(s) + tokens_a_tile - 1) / tokens_a_tile;
        return tiles_a_head * ((group + heads_a_tile - 1) / heads_a_tile) * args.num_kv_heads;
    }

    int num_tokens(int seq) const { return args.token_begin[seq + 1] - args.token_begin[seq]; }
    static int64_t cost(const Item& item) { return int64_t(item.token_end - item.token_begin) * (item.range.high - item.range.low); }

    void plan(int seq, int num_tiles) {
        const int count = num_tokens(seq), before = args.context_len[seq] - count;
        for (int begin = 0; begin < count; begin += tokens_a_tile) {
            const int end = std::min(count, begin + tokens_a_tile);
            const int first_seen = args.window ? std::max(0, before + begin + 1 - args.window) : 0, high = before + end;
            const int low = first_seen / KV_STRETCH * KV_STRETCH;
            const int wanted = (TILES_A_THREAD * args.num_threads + num_tiles - 1) / num_tiles;  // parts, so that every thread has a few
            const int parts = args.num_threads == 1 ? 1 : std::clamp(wanted, 1, std::max(1, (high - low) / PART_TOKENS));
            const int step = up((high - low + parts - 1) / parts, LANES);
            for (int head = 0; head < args.num_heads;) {
                const int kv_head = head / group, head_end = std::min(head + heads_a_tile, (kv_head + 1) * group);
                const int num_parts = (high - low + step - 1) / step;
                for (int part = 0; part < num_parts; part++) {
                    const Limits range{low + part * step, std::min(high, low + (part + 1) * step)};
                    items.push_back(Item{seq, kv_head, head, head_end, begin, end, range, part, num_parts, num_partial});
                }
                if (num_parts > 1) num_partial += num_parts;
                head = head_end;
            }
        }
    }

    // Row r of a tile: token r / heads, head r % heads of its own.
    int num_heads(const Item& item) const { return item.head_end - item.head_begin; }
    int num_rows(const Item& item) const { return (item.token_end - item.token_begin) * num_heads(item); }
    int own_token(const Item& item, int row) const { return item.token_begin + row / num_heads(item); }
    int64_t token_of(const Item& item, int row) const { return args.token_begin[item.seq] + own_token(item, row); }
    int64_t head_of(const Item& item, int row) const { return item.head_begin + row % num_heads(item); }
};

template <typename T, typename Tile>
void run_item(const Work<T>& work, const T* layer_kv, const Item& item, Tile& tile, Running& run) {
    const AttentionArgs& args = work.args;
    const int rows = work.num_rows(item), before = args.context_len[item.seq] - work.num_tokens(item.seq);
    const T* queries[MAX_ROWS];
    Limits seen[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        queries[r] = static_cast<const T*>(args.q) + work.token_of(item, r) * args.q_token_stride + work.head_of(item, r) * args.q_head_stride;
        const int own = before + work.own_token(item, r);
        seen[r] = Limits{args.window ? std::max(0, own + 1 - args.window) : 0, own + 1};
    }
    const KvRows<T> kv{
        layer_kv + int64_t(item.kv_head) * args.block_size * args.head_dim,
        args.tables + args.table_begin[item.seq],
        args.block_stride,
        args.v_offset,
        args.block_size,
        args.head_dim,
    };
    run.start(rows, args.head_dim);
    tile.attend(queries, rows, seen, kv, item.range, args.scale * LOG2_E, run);
}

template <typename T>
void write_out(const Work<T>& work, const Item& item, const Running& run) {
    const AttentionArgs& args = work.args;
    for (int r = 0; r < work.num_rows(item); r++) {
        T* out = static_cast<T*>(args.out) + work.token_of(item, r) * args.out_token_stride + work.head_of(item, r) * args.out_head_stride;
        const float by = 1.0f / run.total[r];
        for (int d = 0; d < args.head_dim; d++) out[d] = from_float<T>(run.sums[size_t(r) * args.head_dim + d] * by);
    }
}

// The parts of one tile become one.
inline void combine(std::vector<Running>& parts, const Item& item, Running& whole, int rows, int dim) {
    whole.start(rows, dim);
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < item.num_parts; p++) whole.most[r] = std::max(whole.most[r], parts[item.first_part + p].most[r]);
        for (int p = 0; p < item.num_parts; p++) {
            const Running& part = parts[item.first_part + p];
            const float by = std::exp2(part.most[r] - whole.most[r]);
            whole.total[r] += part.total[r] * by;
            for (int d = 0; d < dim; d++) whole.sums[size_t(r) * dim + d] += part.sums[size_t(r) * dim + d] * by;
        }
    }
}

constexpr size_t ATTENTION_LOOPS = 2;

// By all members of a team. `parts`: the team's own, at least num_partial.
template <typename T, typename Tile>
void attend(Member& member, const Work<T>& work, const T* layer_kv, std::vector<Running>& parts) {
    thread_local Tile tile;
    thread_local Running run;
    const auto num_items = int64_t(work.items.size());
    member.each(num_items, [&](int64_t i) {
        const Item& item = work.items[i];
        Running& to = item.num_parts > 1 ? parts[item.first_part + item.part] : run;
        run_item(work, layer_kv, item, tile, to);
        if (item.num_parts == 1) write_out(work, item, run);
    });
    member.each(work.num_partial ? num_items : 0, [&](int64_t i) {
        const Item& item = work.items[i];
        if (item.num_parts == 1 || item.part) return;
        combine(parts, item, run, work.num_rows(item), work.args.head_dim);
        write_out(work, item, run);
    });
}

}  // namespace baton
