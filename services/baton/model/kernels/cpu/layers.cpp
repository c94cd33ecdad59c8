// Exports the functions of layers.h one by one, for steps whose matrix products are torch's.
#include "layers.h"

extern "C" {

// See add_and_norm in layers.h.
struct AddAndNormArgs {
    void* x;
    const void* added;
    void* out;
    baton::NormArgs after;
    baton::NormArgs norm;
    int64_t rows;
    float multiplier;
    int32_t size;
    int32_t num_threads;
    int32_t dtype;
};

void baton_add_and_norm(const AddAndNormArgs* args) {
    baton::dispatch_dtype(args->dtype, [&](auto one) {
        using T = decltype(one);
        const int threads = args->rows * args->size > baton::MIN_PARALLEL_ELEMENTS ? args->num_threads : 1;
        baton::run_team(threads, 1, [&](baton::TeamThread& team) {
            baton::add_and_norm(team, static_cast<T*>(args->x), static_cast<const T*>(args->added), args->after,
                args->multiplier, args->norm, static_cast<T*>(args->out), args->rows, args->size);
        });
    });
}

void baton_rope_and_store_kv(const baton::RopeArgs* args) {
    baton::dispatch_dtype(args->dtype, [&](auto one) {
        const int64_t size = int64_t(args->num_heads + 2 * args->num_kv_heads) * args->head_dim;
        baton::run_team(args->num_tokens * size > baton::MIN_PARALLEL_ELEMENTS ? args->num_threads : 1, 1,
            [&](baton::TeamThread& team) {
            baton::rope_and_store_kv<decltype(one)>(team, *args);
        });
    });
}

void baton_gate(const void* x, void* out, int64_t rows, int32_t size, const baton::GateArgs* args, int32_t threads,
    int32_t dtype) {
    baton::dispatch_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        baton::run_team(rows * size > baton::MIN_PARALLEL_ELEMENTS ? threads : 1, 1, [&](baton::TeamThread& team) {
            baton::gate(team, static_cast<const T*>(x), static_cast<T*>(out), rows, size, *args);
        });
    });
}
}
