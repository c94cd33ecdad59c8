// What stands between a layer's matrix products: norms, rotary, the gate; and what is left of a step in its last layer. Each reads its input
// once; sums are in float. All members of a team call them; each is one loop.
#pragma once

#include <cmath>

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

// out = x / rms(x) * weight; x += added before, if there is something to add.
template <typename T>
void rms_norm(Member& member, T* x, const T* added, const T* weight, T* out, int64_t rows, int size, float eps) {
    member.each_short(rows, [&](int64_t r) {
        T* row = x + r * size;
        if (added) {
            const T* more = added + r * size;
            for (int i = 0; i < size; i++) row[i] = from_float<T>(to_float(row[i]) + to_float(more[i]));
        }
        const float by = 1.0f / std::sqrt(mean_square(row, size) + eps);
        T* to = out + r * size;
        for (int i = 0; i < size; i++) to[i] = from_float<T>(to_float(row[i]) * by * to_float(weight[i]));
    });
}

// One head of one token: normed if there is a weight, then turned by its position, [0, half) with [half, dim).
template <typename T>
void turn(const T* head, const T* weight, float eps, const float* cosine, const float* sine, int dim, T* out) {
    const float by = weight ? 1.0f / std::sqrt(mean_square(head, dim) + eps) : 1.0f;
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        if (weight) {
            a *= by * to_float(weight[i]);
            b *= by * to_float(weight[half + i]);
        }
        out[i] = from_float<T>(a * cosine[i] - b * sine[i]);
        out[half + i] = from_float<T>(b * cosine[i] + a * sine[i]);
    }
}

struct HeadsArgs {
    void* qkv;              // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; queries are turned in place
    void* kv;               // of this layer, see attention.h
    const int64_t* slots;   // [num_tokens]: element of head 0's key of each token
    const float* cosine;    // [num_tokens, head_dim / 2]
    const float* sine;
    const void* q_weight;   // [head_dim] or null
    const void* k_weight;
    int64_t head_stride;    // from one KV head to the next
    int64_t v_offset;
    int64_t num_tokens;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t num_threads;
    int32_t dtype;
    float eps;
};

// Queries stay where they are; keys and values go to their blocks.
template <typename T>
void turn_and_store(Member& member, const HeadsArgs& args) {
    const int dim = args.head_dim, row_size = (args.num_heads + 2 * args.num_kv_heads) * dim;
    const auto* q_weight = static_cast<const T*>(args.q_weight);
    const auto* k_weight = static_cast<const T*>(args.k_weight);
    member.each_short(args.num_tokens, [&](int64_t t) {
        T* row = static_cast<T*>(args.qkv) + t * row_size;
        const float* cosine = args.cosine + t * (dim / 2);
        const float* sine = args.sine + t * (dim / 2);
        for (int h = 0; h < args.num_heads; h++) turn(row + h * dim, q_weight, args.eps, cosine, sine, dim, row + h * dim);
        const T* keys = row + args.num_heads * dim;
        const T* values = keys + args.num_kv_heads * dim;
        for (int h = 0; h < args.num_kv_heads; h++) {
            T* to = static_cast<T*>(args.kv) + args.slots[t] + h * args.head_stride;
            turn(keys + h * dim, k_weight, args.eps, cosine, sine, dim, to);
            std::memcpy(to + args.v_offset, values + h * dim, size_t(dim) * sizeof(T));
        }
    });
}

// out[r, i] = silu(x[r, i]) * x[r, size + i]
template <typename T>
void silu_gate(Member& member, const T* x, T* out, int64_t rows, int size) {
    member.each_short(rows, [&](int64_t r) {
        const T* gate = x + r * 2 * size;
        const T* rest = gate + size;
        T* to = out + r * size;
        for (int i = 0; i < size; i++) {
            const float g = to_float(gate[i]);
            to[i] = from_float<T>(g / (1.0f + exp2_near(-g * LOG2_E)) * to_float(rest[i]));
        }
    });
}

// Whether each row is all numbers: into is_finite[r]; or, with `to`, is_finite[to[r]] stays true only if it is.
template <typename T>
void note_finite(Member& member, const T* x, int64_t rows, int64_t size, const int64_t* to, uint8_t* is_finite) {
    member.each_short(rows, [&](int64_t r) {
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

// The first `size` numbers of some rows, ascending, to the place of as many first rows. By one member: rows that are read come behind those
// that are written.
template <typename T>
void keep_rows(Member& member, T* x, int64_t stride, int64_t size, const int64_t* rows, int64_t count) {
    member.each(count ? 1 : 0, [&](int64_t) {
        for (int64_t i = 0; i < count; i++) std::memmove(x + i * stride, x + rows[i] * stride, size_t(size) * sizeof(T));
    });
}

}  // namespace baton
