// Paged attention for a packed batch: each query token attends to its own sequence's KV, up to and including
// its own index.
//
// It is an online softmax over tiles of KV (FlashAttention, Dao et al. 2022). If threads are to spare,
// decoding sequences are also split along their KV (Flash-Decoding, Dao et al. 2023). No context is gathered:
// a tile reads keys and values from their blocks, some dozens of tokens at a time, see
// attention_decode_bf16.h and attention_decode_float.h.
#pragma once

#include "layer_kv.h"

namespace baton {

// q, out: [num_tokens, num_heads, head_dim], strided; strides are in elements.
// kv, kv_strides: see layer_kv.h.
// Sequence s has the tokens [token_begin[s], token_begin[s + 1]), the last ones of its context_len[s]. Its
// block table begins at tables[table_begin[s]].
// window: number of visible tokens, the current one included; 0 for all.
// sinks: [num_heads] or null. Each row's softmax has this score as one more term, which has no value.
// Slots beyond a sequence's end may hold anything, and blocks wholly before the window of a sequence's first
// token of this step may hold anything or be missing: neither is read.
struct AttentionArgs {
    const void* q;
    void* out;
    LayerKv kv;
    const int32_t* token_begin;
    const int32_t* context_len;
    const int32_t* table_begin;
    const int32_t* tables;
    const float* sinks;
    int64_t q_token_stride;
    int64_t q_head_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    KvStrides kv_strides;
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
