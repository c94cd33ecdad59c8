#include "attention.h"

#include "attention_work.h"

namespace baton {
namespace {

template <typename T, typename Kernel>
void attention(const AttentionArgs& args) {
    const AttentionPlan<T> plan(args, Kernel::MAX_TILE_ROWS);
    std::vector<SoftmaxState> split_states(plan.num_split_states);
    run_team(args.num_threads, NUM_ATTENTION_LOOPS,
        [&](TeamThread& team) { attend<T, Kernel>(team, plan, args.kv, args.tables, args.sinks, split_states); });
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_attention(const baton::AttentionArgs* args) {
    using namespace baton;
    switch (args->dtype) {
        case FLOAT32: return attention<float, AttentionTileFloat<float>>(*args);
        case FLOAT16: return attention<Fp16, AttentionTileFloat<Fp16>>(*args);
        default: break;
    }
#ifdef BATON_HAS_BF16_DOT
    if (args->head_dim % 32 == 0 && args->head_dim <= AttentionTileBf16::MAX_DIM)
        return attention<Bf16, AttentionTileBf16>(*args);
#endif
    attention<Bf16, AttentionTileFloat<Bf16>>(*args);
}
