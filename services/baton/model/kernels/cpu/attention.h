// Paged attention for a packed batch: each query token attends to its own sequence's KV, up to and including its own index.
//
// Online softmax over tiles of KV (FlashAttention, Dao et al. 2022); sequences of one token are cut along their KV as well where there are
// threads to spare (Flash-Decoding, Dao et al. 2023). No context is gathered: a tile reads keys and values out of their blocks, some dozens of
// tokens at a time (attention_decode_bf16.h, attention_decode_float.h).
#pragma once

#include <cstdint>

namespace baton {

// Shapes: q and out [num_tokens, num_heads, head_dim], strided; KV of block b begins at kv + b * block_stride: keys [num_kv_heads,
// block_size, head_dim], values v_offset further on. All strides are in elements. Sequence s has the tokens [token_begin[s],
// token_begin[s + 1]), which are the last ones of its context_len[s]; its block table begins at tables[table_begin[s]].
// window: how many tokens are seen, the current one included; 0: all. Slots past a sequence's end may hold anything.
struct AttentionArgs {
    const void* q;
    void* out;
    const void* kv;
    const int32_t* token_begin;
    const int32_t* context_len;
    const int32_t* table_begin;
    const int32_t* tables;
    int64_t q_token_stride;
    int64_t q_head_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t block_stride;
    int64_t v_offset;
    int32_t num_seqs;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t window;
    int32_t num_threads;
    int32_t dtype;
    float scale;
};

}  // namespace baton
