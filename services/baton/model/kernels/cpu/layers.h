// Everything between a layer's matrix products: norms, RoPE, the gate, and reducing the last layer to the
// sampled rows. Each function reads its input once and sums in float. Each is one parallel loop, which all
// threads of the team call.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_kv.h"
#include "numbers.h"
#include "parallel_for.h"

namespace baton {

// An RMS norm: x / sqrt(mean(x * x) + eps) * factor. factor: null if there is no norm.
struct NormArgs {
    const float* factor;
    float eps;
};

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

template <typename T>
float inverse_rms(const T* row, int size, float eps) {
    return 1.0f / std::sqrt(mean_square(row, size) + eps);
}

// x += multiplier * norm(added), unless `added` is null. Then out = norm(x), unless `norm` is none.
// after: the norm of `added`, or none.
template <typename T>
void add_and_norm(TeamThread& team, T* x, const T* added, const NormArgs& after, float multiplier,
    const NormArgs& norm, T* out, int64_t rows, int size) {
    if (!added && !norm.factor) return;
    team.parallel_for_batched(rows, [&](int64_t r) {
        T* row = x + r * size;
        if (added) {
            const T* added_row = added + r * size;
            if (after.factor) {
                const float scale = multiplier * inverse_rms(added_row, size, after.eps);
                for (int i = 0; i < size; i++)
                    row[i] = from_float<T>(to_float(row[i]) + to_float(added_row[i]) * scale * after.factor[i]);
            } else {
                for (int i = 0; i < size; i++)
                    row[i] = from_float<T>(to_float(row[i]) + multiplier * to_float(added_row[i]));
            }
        }
        if (!norm.factor) return;
        const float scale = inverse_rms(row, size, norm.eps);
        T* to = out + r * size;
        for (int i = 0; i < size; i++) to[i] = from_float<T>(to_float(row[i]) * scale * norm.factor[i]);
    });
}

constexpr int MAX_HEAD_DIM = 1024;

// RoPE of one head: element i of the first `half` is rotated with element i of the second `half`, and the
// others stay. The head is a copy, because queries are rotated in place: a loop that may overwrite its own
// input is not vectorised.
template <typename T>
void rotate(const float* head, const float* cosine, const float* sine, int half, int dim, float multiplier, T* out) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[half + i], c = multiplier * cosine[i], s = multiplier * sine[i];
        out[i] = from_float<T>(a * c - b * s);
        out[half + i] = from_float<T>(b * c + a * s);
    }
    for (int i = 2 * half; i < dim; i++) out[i] = from_float<T>(multiplier * head[i]);
}

// Cosine and sine of a step, [num_tokens, half]. half: half of the elements of a head that are rotated.
struct RotaryTable {
    const float* cosine;
    const float* sine;
    int32_t half;
};

struct RopeArgs {
    void* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries change in place
    LayerKv kv;  // of this layer
    const int64_t* slots;  // [num_tokens]: each token's block times block_size, plus its place in the block
    const float* query_scale;  // [num_tokens] factors of the rotated queries, or null
    NormArgs q_norm;  // factor: [head_dim], or with `norms_all_heads` [num_heads * head_dim]
    NormArgs k_norm;
    RotaryTable rotary;
    KvStrides kv_strides;
    int64_t num_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t num_threads;
    int32_t dtype;
    int32_t norms_all_heads;  // a norm is over all heads of a token, not over each
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

// Normalises and rotates the heads of one token. to(head): where a head goes; it may be the head itself.
template <typename T, typename To>
void norm_and_rotate(const T* heads, int num_heads, const NormArgs& norm, const RopeArgs& args, int64_t token,
    float multiplier, const To& to) {
    const int dim = args.head_dim, half = args.rotary.half;
    const float *cosine = args.rotary.cosine + token * half, *sine = args.rotary.sine + token * half;
    const bool is_joint = norm.factor && args.norms_all_heads;
    const float joint = is_joint ? inverse_rms(heads, num_heads * dim, norm.eps) : 0.0f;
    for (int h = 0; h < num_heads; h++) {
        const T* head = heads + h * dim;
        alignas(64) float values[MAX_HEAD_DIM];
        if (norm.factor) {
            const float* factor = is_joint ? norm.factor + h * dim : norm.factor;
            const float scale = is_joint ? joint : inverse_rms(head, dim, norm.eps);
            for (int i = 0; i < dim; i++) values[i] = to_float(head[i]) * scale * factor[i];
        } else {
            for (int i = 0; i < dim; i++) values[i] = to_float(head[i]);
        }
        rotate(values, cosine, sine, half, dim, multiplier, to(h));
    }
}

// Applies norm and RoPE to queries in place and to keys on their way into the cache; stores values in the
// cache.
template <typename T>
void rope_and_store_kv(TeamThread& team, const RopeArgs& args) {
    const int dim = args.head_dim, row_size = (args.num_heads + 2 * args.num_kv_heads) * dim;
    team.parallel_for_batched(args.num_tokens, [&](int64_t t) {
        T* row = static_cast<T*>(args.qkv) + t * row_size;
        const T* keys = row + args.num_heads * dim;
        const T* values = keys + args.num_kv_heads * dim;
        const bool is_untouched = !args.q_norm.factor && !args.rotary.half && !args.query_scale;
        if (!is_untouched)
            norm_and_rotate(row, args.num_heads, args.q_norm, args, t,
                args.query_scale ? args.query_scale[t] : 1.0f, [&](int h) { return row + h * dim; });
        thread_local std::vector<T> rotated;
        rotated.resize(size_t(args.num_kv_heads) * dim);
        norm_and_rotate(keys, args.num_kv_heads, args.k_norm, args, t, 1.0f,
            [&](int h) { return rotated.data() + h * dim; });
        for (int h = 0; h < args.num_kv_heads; h++)
            store_kv(args, args.slots[t], h, rotated.data() + h * dim, values + h * dim);
    });
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2 };

// How the halves of an MLP's first product are joined: activation(gate) * (up + up_shift), with gate at most
// `limit` and up between -limit and limit. alpha: of SILU, x * sigmoid(alpha * x).
struct GateArgs {
    int32_t activation;  // see Activation
    float alpha;
    float limit;
    float up_shift;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp2(-x * LOG2_E)); }

// 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
inline float gelu_tanh(float x) { return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); }

// x times the normal distribution function. Its error is below 1e-7 (Abramowitz and Stegun, 7.1.26).
inline float gelu(float x) {
    const float y = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * y);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float upper = 0.5f * p * t * fast_exp2(-y * y * LOG2_E);
    return x * (x < 0.0f ? upper : 1.0f - upper);
}

// out [rows, size]: the halves of each row of x [rows, 2 * size], joined. A NaN passes the limits.
template <typename T, typename Function>
void gate_with(TeamThread& team, const T* x, T* out, int64_t rows, int size, const GateArgs& args,
    const Function& activation) {
    team.parallel_for_batched(rows, [&](int64_t r) {
        const T* gates = x + r * 2 * size;
        const T* ups = gates + size;
        T* to = out + r * size;
        const float limit = args.limit, up_shift = args.up_shift;  // a store to `to` cannot change copies
        const Function function = activation;
        for (int i = 0; i < size; i++) {
            const float gate = std::min(to_float(gates[i]), limit);
            const float up = std::max(std::min(to_float(ups[i]), limit), -limit);
            to[i] = from_float<T>(function(gate) * (up + up_shift));
        }
    });
}

template <typename T>
void gate(TeamThread& team, const T* x, T* out, int64_t rows, int size, const GateArgs& args) {
    const float alpha = args.alpha;
    switch (args.activation) {
        case GELU_TANH: return gate_with(team, x, out, rows, size, args, [](float g) { return gelu_tanh(g); });
        case GELU: return gate_with(team, x, out, rows, size, args, [](float g) { return gelu(g); });
        default:
            return gate_with(team, x, out, rows, size, args, [=](float g) { return g * sigmoid(alpha * g); });
    }
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
