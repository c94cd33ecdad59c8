// The parts of `layers.h` one by one, for steps whose matrix products are others'.
#include "layers.h"

namespace baton {
namespace {

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
#pragma omp parallel num_threads(threads) if (rows * size > 32768)
        baton::rms_norm(static_cast<T*>(x), static_cast<const T*>(added), static_cast<const T*>(weight), static_cast<T*>(out), rows, size, eps);
    });
}

void baton_turn_and_store(const baton::HeadsArgs* args) {
    baton::by_dtype(args->dtype, [&](auto one) {
#pragma omp parallel num_threads(args->num_threads) if (args->num_tokens > 8)
        baton::turn_and_store<decltype(one)>(*args);
    });
}

void baton_silu_gate(const void* x, void* out, int64_t rows, int32_t size, int32_t threads, int32_t dtype) {
    baton::by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
#pragma omp parallel num_threads(threads) if (rows * size > 32768)
        baton::silu_gate(static_cast<const T*>(x), static_cast<T*>(out), rows, size);
    });
}
}
