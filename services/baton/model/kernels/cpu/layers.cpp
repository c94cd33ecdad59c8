// The parts of `layers.h` one by one, for steps whose matrix products are others'.
#include "layers.h"

namespace baton {
namespace {

constexpr int64_t WORTH_A_TEAM = 32768;  // elements

template <typename Body>
void by_dtype(int32_t dtype, Body body) {
    switch (dtype) {
        case FLOAT32: return body(float{});
        case BFLOAT16: return body(Bf16{});
        default: return body(Fp16{});
    }
}

}  // namespace
}  // namespace baton

extern "C" {

void baton_rms_norm(void* x, const void* added, const void* weight, void* out, int64_t rows, int32_t size, float eps, int32_t threads, int32_t dtype) {
    baton::by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        baton::by_team(rows * size > baton::WORTH_A_TEAM ? threads : 1, 1, [&](baton::Member& member) {
            const auto *more = static_cast<const T*>(added), *by = static_cast<const T*>(weight);
            baton::rms_norm(member, static_cast<T*>(x), more, by, static_cast<T*>(out), rows, size, eps);
        });
    });
}

void baton_turn_and_store(const baton::HeadsArgs* args) {
    baton::by_dtype(args->dtype, [&](auto one) {
        const int64_t size = int64_t(args->num_heads + 2 * args->num_kv_heads) * args->head_dim;
        baton::by_team(args->num_tokens * size > baton::WORTH_A_TEAM ? args->num_threads : 1, 1, [&](baton::Member& member) {
            baton::turn_and_store<decltype(one)>(member, *args);
        });
    });
}

void baton_silu_gate(const void* x, void* out, int64_t rows, int32_t size, int32_t threads, int32_t dtype) {
    baton::by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        baton::by_team(rows * size > baton::WORTH_A_TEAM ? threads : 1, 1, [&](baton::Member& member) {
            baton::silu_gate(member, static_cast<const T*>(x), static_cast<T*>(out), rows, size);
        });
    });
}
}
