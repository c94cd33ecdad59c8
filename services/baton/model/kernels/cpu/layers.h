// Everything between a layer's matrix products: norms, RoPE, the gate, and reducing the last layer to the
// sampled rows. Each function reads its input once and sums in float. Each is one parallel loop, which all
// threads of the team call.
#pragma once

#include <cmath>
#include <vector>

#include "layer_kv.h"
#include "numbers.h"
#include "parallel_for.h"

namespace baton {

template <typename T>
float mean_square(const T* row, int size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; i++) {
        const float value = to_float(row[i]);
        sum += value * value;
    }
    return sum / float(size);
}

// out = x / rms(x) * weight, after x += added unless `added` is null.
template <typename T>
void rms_norm(TeamThread& team, T* x, const T* added, const T* weight, T* out, int64_t rows, int size, float eps) {
    team.parallel_for_batched(rows, [&](int64_t r) {
        T* row = x + r * size;
        if (added) {
            const T* added_row = added + r * size;
            for (int i = 0; i < size; i++) row[i] = from_float<T>(to_float(row[i]) + to_float(added_row[i]));
        }
        const float scale = 1.0f / std::sqrt(mean_square(row, size) + eps);
        T* to = out + r * size;
        for (int i = 0; i < size; i++) to[i] = from_float<T>(to_float(row[i]) * scale * to_float(weight[i]));
    });
}

// RMS norm (unless weight is null) and RoPE of one head of one token. Element i of the first half is rotated
// with element i of the second half.
template <typename T>
void apply_rope(const T* head, const T* weight, float eps, const float* cosine, const float* sine, int dim, T* out) {
    const float scale = weight ? 1.0f / std::sqrt(mean_square(head, dim) + eps) : 1.0f;
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        if (weight) {
            a *= scale * to_float(weight[i]);
            b *= scale * to_float(weight[half + i]);
        }
        out[i] = from_float<T>(a * cosine[i] - b * sine[i]);
        out[half + i] = from_float<T>(b * cosine[i] + a * sine[i]);
    }
}

struct RopeArgs {
    void* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries change in place
    LayerKv kv;  // of this layer
    const int64_t* slots;  // [num_tokens]: each token's block times block_size, plus its place in the block
    const float* cosine;    // [num_tokens, head_dim / 2]
    const float* sine;
    const void* q_weight;   // [head_dim] or null
    const void* k_weight;
    KvStrides kv_strides;
    int64_t num_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t num_threads;
    int32_t dtype;
    float eps;
};

// Stores one head's key and value, which RoPE has been applied to, in a slot.
template <typename T>
void store_kv(const RopeArgs& args, int64_t slot, int head, const T* key, const T* value) {
    const int64_t block = slot / args.block_size, place = slot % args.block_size, dim = args.head_dim;
    const int64_t begin = block * args.kv_strides.block + head * args.kv_strides.head;
    if (!args.kv.is_quantized()) {
        std::memcpy(add_bytes(static_cast<T*>(args.kv.keys), begin) + place * dim, key, size_t(dim) * sizeof(T));
        std::memcpy(add_bytes(static_cast<T*>(args.kv.values), begin) + place * dim, value, size_t(dim) * sizeof(T));
        return;
    }
    const int64_t scales = block * args.kv_strides.block + head * args.kv_strides.scale_head;
    auto *keys = add_bytes(static_cast<int8_t*>(args.kv.keys), begin) + place * dim,
         *values = add_bytes(static_cast<int8_t*>(args.kv.values), begin) + place * dim;
    add_bytes(args.kv.key_scales, scales)[place] = quantize_row(key, int(dim), keys);
    add_bytes(args.kv.value_scales, scales)[place] = quantize_row(value, int(dim), values);
}

// Applies RoPE to queries in place and to keys on their way into the cache; stores values in the cache.
template <typename T>
void rope_and_store_kv(TeamThread& team, const RopeArgs& args) {
    const int dim = args.head_dim, row_size = (args.num_heads + 2 * args.num_kv_heads) * dim;
    const auto* q_weight = static_cast<const T*>(args.q_weight);
    const auto* k_weight = static_cast<const T*>(args.k_weight);
    team.parallel_for_batched(args.num_tokens, [&](int64_t t) {
        T* row = static_cast<T*>(args.qkv) + t * row_size;
        const float* cosine = args.cosine + t * (dim / 2);
        const float* sine = args.sine + t * (dim / 2);
        for (int h = 0; h < args.num_heads; h++) apply_rope(row + h * dim, q_weight, args.eps, cosine, sine, dim,
            row + h * dim);
        const T* keys = row + args.num_heads * dim;
        const T* values = keys + args.num_kv_heads * dim;
        thread_local std::vector<T> rotated;
        rotated.resize(dim);
        for (int h = 0; h < args.num_kv_heads; h++) {
            apply_rope(keys + h * dim, k_weight, args.eps, cosine, sine, dim, rotated.data());
            store_kv(args, args.slots[t], h, rotated.data(), values + h * dim);
        }
    });
}

// out[r, i] = silu(x[r, i]) * x[r, size + i]
template <typename T>
void silu_gate(TeamThread& team, const T* x, T* out, int64_t rows, int size) {
    team.parallel_for_batched(rows, [&](int64_t r) {
        const T* gate = x + r * 2 * size;
        const T* up = gate + size;
        T* to = out + r * size;
        for (int i = 0; i < size; i++) {
            const float g = to_float(gate[i]);
            to[i] = from_float<T>(g / (1.0f + fast_exp2(-g * LOG2_E)) * to_float(up[i]));
        }
    });
}

// is_finite[r] = row r is finite. With `to`, is_finite[to[r]] is only cleared, never set.
template <typename T>
void check_finite(TeamThread& team, const T* x, int64_t rows, int64_t size, const int64_t* to, uint8_t* is_finite) {
    team.parallel_for_batched(rows, [&](int64_t r) {
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += to_float(x[r * size + i]);
        if (to) {
            is_finite[to[r]] &= std::isfinite(sum);
        } else {
            is_finite[r] = std::isfinite(sum);
        }
    });
}

// Moves the first `size` elements of the given rows, ascending, to the first `count` rows. One thread does it
// in order, because a source row never precedes its destination.
template <typename T>
void compact_rows(TeamThread& team, T* x, int64_t stride, int64_t size, const int64_t* rows, int64_t count) {
    team.parallel_for(count ? 1 : 0, [&](int64_t) {
        for (int64_t i = 0; i < count; i++) std::memmove(x + i * stride, x + rows[i] * stride,
            size_t(size) * sizeof(T));
    });
}

}  // namespace baton
