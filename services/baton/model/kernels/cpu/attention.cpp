#include "attention.h"

#include "attention_work.h"

namespace baton {
namespace {

template <typename T, typename Tile>
void attention(const AttentionArgs& args) {
    const Work<T> work(args, Tile::MOST_ROWS);
    std::vector<Running> parts(work.num_partial);
    by_team(args.num_threads, ATTENTION_LOOPS, [&](Member& member) { attend<T, Tile>(member, work, static_cast<const T*>(args.kv), parts); });
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_attention(const baton::AttentionArgs* args) {
    using namespace baton;
    switch (args->dtype) {
        case FLOAT32: return attention<float, FloatTile<float>>(*args);
        case FLOAT16: return attention<Fp16, FloatTile<Fp16>>(*args);
        default: break;
    }
#ifdef BATON_PAIRS
    if (args->head_dim % 32 == 0 && args->head_dim <= PairTile::MAX_DIM) return attention<Bf16, PairTile>(*args);
#endif
    attention<Bf16, FloatTile<Bf16>>(*args);
}
