// All layers of a decoder over one step, in one go: a team of threads that stays awake from the first product to the last norm.
#include <map>
#include <memory>

#include "attention_work.h"
#include "layers.h"
#include "gemm.h"

namespace baton {

struct ProductArgs {
    const void* words;
    const void* bias;
    int64_t n;
    int64_t k;
};

// q_norm, k_norm [head_dim] or null; kv: of this layer, see attention.h; window, scale: likewise.
struct LayerArgs {
    ProductArgs qkv, o, gate_up, down;
    const void* input_norm;
    const void* post_norm;
    const void* q_norm;
    const void* k_norm;
    void* kv;
    int32_t window;
    float scale;
};

// hidden [num_tokens, size] is the embedding's, and is written over; out [num_tokens, size]: its first num_rows are `rows`, ascending, after
// the last norm. Of the other tokens the last layer computes keys and values only. is_finite [num_tokens]: whether those, and what `rows`
// became, are all numbers. scratch: room for num_tokens times (size + the rows of qkv + heads * head_dim + the rows of gate_up + half of
// those). rows_attention: of `rows` alone, each a sequence of one token; not looked at if they are all there are.
struct DecoderArgs {
    const LayerArgs* layers;
    const void* final_norm;
    void* hidden;
    void* out;
    void* scratch;
    uint8_t* is_finite;
    const int64_t* rows;
    int64_t num_rows;
    int64_t num_tokens;
    int32_t num_layers;
    int32_t size;
    float eps;
    AttentionArgs attention;
    AttentionArgs rows_attention;
    HeadsArgs heads;
};

namespace {

Product product_of(const ProductArgs& args) {
    return Product{static_cast<const uint32_t*>(args.words), static_cast<const Bf16*>(args.bias), args.n, args.k};
}

constexpr int64_t LAYER_LOOPS = 8 + ATTENTION_LOOPS, LAST_LOOPS = 5;

// Attention of a layer, planned once for all that ask for the same; few ask for something else.
template <typename Tile>
class Plans {
  public:
    explicit Plans(const AttentionArgs& of) : of_(of) {}

    void add(const LayerArgs& layer) {
        auto& [own, work] = made_[{layer.window, layer.scale}];
        if (work) return;
        own = of_;
        own.window = layer.window;
        own.scale = layer.scale;
        work = std::make_unique<Work<Bf16>>(own, Tile::MOST_ROWS);
    }

    const Work<Bf16>& of(const LayerArgs& layer) const { return *made_.at({layer.window, layer.scale}).second; }

    size_t most_partial() const {
        size_t most = 0;
        for (const auto& [_, made] : made_) most = std::max(most, size_t(made.second->num_partial));
        return most;
    }

  private:
    AttentionArgs of_;
    std::map<std::pair<int, float>, std::pair<AttentionArgs, std::unique_ptr<Work<Bf16>>>> made_;
};

template <typename Tile>
void decode(const DecoderArgs& args) {
    const int64_t tokens = args.num_tokens, size = args.size;
    const int threads = args.attention.num_threads;
    const LayerArgs &first = args.layers[0], &last = args.layers[args.num_layers - 1];
    const bool are_all = args.num_rows == tokens;
    auto* hidden = static_cast<Bf16*>(args.hidden);
    auto* normed = static_cast<Bf16*>(args.out);
    auto* more = static_cast<Bf16*>(args.scratch);
    auto* qkv = more + tokens * size;
    auto* attended = qkv + tokens * first.qkv.n;
    auto* gates = attended + tokens * first.o.k;
    auto* gated = gates + tokens * first.gate_up.n;
    const auto planned = [&](AttentionArgs attention) {
        attention.q = qkv;
        attention.out = attended;
        return Plans<Tile>(attention);
    };
    Plans<Tile> plans = planned(args.attention), last_plans = planned(args.rows_attention);
    for (int l = 0; l < args.num_layers; l++) plans.add(args.layers[l]);
    if (!are_all) last_plans.add(last);
    std::vector<Running> parts(std::max(plans.most_partial(), last_plans.most_partial()));
    by_team(threads, args.num_layers * LAYER_LOOPS + LAST_LOOPS, [&](Member& member) {
        int64_t rows = tokens;
        for (int l = 0; l < args.num_layers; l++) {
            const LayerArgs& layer = args.layers[l];
            rms_norm<Bf16>(member, hidden, l ? more : nullptr, static_cast<const Bf16*>(layer.input_norm), normed, tokens, int(size), args.eps);
            product(member, normed, product_of(layer.qkv), qkv, tokens, threads);
            HeadsArgs heads = args.heads;
            heads.qkv = qkv;
            heads.kv = layer.kv;
            heads.q_weight = layer.q_norm;
            heads.k_weight = layer.k_norm;
            turn_and_store<Bf16>(member, heads);
            const Plans<Tile>* plan = &plans;
            if (&layer == &last) {
                note_finite(member, qkv, tokens, layer.qkv.n, nullptr, args.is_finite);
                if (!are_all) {
                    keep_rows(member, hidden, size, size, args.rows, args.num_rows);
                    keep_rows(member, qkv, layer.qkv.n, layer.o.k, args.rows, args.num_rows);
                    plan = &last_plans;
                    rows = args.num_rows;
                }
            }
            attend<Bf16, Tile>(member, plan->of(layer), static_cast<const Bf16*>(layer.kv), parts);
            product(member, attended, product_of(layer.o), more, rows, threads);
            rms_norm<Bf16>(member, hidden, more, static_cast<const Bf16*>(layer.post_norm), normed, rows, int(size), args.eps);
            product(member, normed, product_of(layer.gate_up), gates, rows, threads);
            silu_gate<Bf16>(member, gates, gated, rows, int(layer.down.k));
            product(member, gated, product_of(layer.down), more, rows, threads);
        }
        rms_norm<Bf16>(member, hidden, more, static_cast<const Bf16*>(args.final_norm), normed, rows, int(size), args.eps);
        note_finite(member, normed, rows, size, args.rows, args.is_finite);
    });
}

}  // namespace

}  // namespace baton

extern "C" {

// Whether products take pairs at a time.
int32_t baton_multiplies_pairs() {
#ifdef BATON_PAIRS
    return 1;
#else
    return 0;
#endif
}

// weights [n, k] bfloat16 -> words [n / 64 rounded up, k / 2, 64]
void baton_pack(const void* weights, void* words, int64_t n, int64_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < (n + baton::PANEL - 1) / baton::PANEL; panel++) {
        baton::pack_panel(static_cast<const baton::Bf16*>(weights), n, k, panel, static_cast<uint32_t*>(words));
    }
}

// x [rows, k] bfloat16 -> out [rows, n] of `dtype`, bfloat16 or float32
void baton_product(const void* x, const baton::ProductArgs* by, void* out, int64_t rows, int32_t threads, int32_t dtype) {
    using namespace baton;
    by_team(threads, 1, [&](Member& member) {
        const auto* left = static_cast<const Bf16*>(x);
        if (dtype == FLOAT32) return product(member, left, product_of(*by), static_cast<float*>(out), rows, threads);
        product(member, left, product_of(*by), static_cast<Bf16*>(out), rows, threads);
    });
}

void baton_decode(const baton::DecoderArgs* args) {
    using namespace baton;
#ifdef BATON_PAIRS
    const int dim = args->attention.head_dim;
    if (dim % 32 == 0 && dim <= PairTile::MAX_DIM) return decode<PairTile>(*args);
#endif
    decode<FloatTile<Bf16>>(*args);
}
}
