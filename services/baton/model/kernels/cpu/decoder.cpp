// Runs all layers of a decoder over one step, in one team of threads from the first product to the last norm.
#include <map>
#include <memory>

#include "attention_work.h"
#include "layers.h"
#include "gemm.h"

namespace baton {

struct GemmArgs {
    const void* packed;
    const void* bias;
    int64_t n;
    int64_t k;
};

// q_norm, k_norm: [head_dim] or null; kv: this layer's KV, see layer_kv.h; window, scale: see attention.h.
struct LayerArgs {
    GemmArgs qkv, o, gate_up, down;
    const void* input_norm;
    const void* post_norm;
    const void* q_norm;
    const void* k_norm;
    LayerKv kv;
    int32_t window;
    float scale;
};

// hidden [num_tokens, size]: the embeddings; overwritten.
// out [num_tokens, size]: its first num_rows rows receive `rows` after the last norm.
// rows, ascending: the tokens whose output is needed. For all others, the last layer computes only keys and
// values.
// is_finite [num_tokens]: true if a token's last keys and values, and its output if it is in `rows`, are
// finite.
// scratch: num_tokens times (size + qkv.n + heads * head_dim + gate_up.n + gate_up.n / 2) elements.
// rows_attention: attention of `rows` only, each as a sequence of one token; unused if `rows` has all tokens.
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
    RopeArgs rope;
};

namespace {

PackedWeights packed_weights(const GemmArgs& args) {
    return PackedWeights{static_cast<const uint32_t*>(args.packed), static_cast<const Bf16*>(args.bias), args.n,
        args.k};
}

constexpr int64_t LOOPS_PER_LAYER = 8 + NUM_ATTENTION_LOOPS, FINAL_LOOPS = 5;

// Attention plans by (window, scale). Most layers share one plan.
template <typename Kernel>
class LayerPlans {
  public:
    explicit LayerPlans(const AttentionArgs& of) : step_args_(of) {}

    void add(const LayerArgs& layer) {
        auto& [layer_args, plan] = plans_[{layer.window, layer.scale}];
        if (plan) return;
        layer_args = step_args_;
        layer_args.window = layer.window;
        layer_args.scale = layer.scale;
        plan = std::make_unique<AttentionPlan<Bf16>>(layer_args, Kernel::MAX_TILE_ROWS);
    }

    const AttentionPlan<Bf16>& of(const LayerArgs& layer) const { return *plans_.at({layer.window,
        layer.scale}).second; }

    size_t max_num_splits() const {
        size_t max_splits = 0;
        for (const auto& [_, plan] : plans_) max_splits = std::max(max_splits, size_t(plan.second->num_split_states));
        return max_splits;
    }

  private:
    AttentionArgs step_args_;
    std::map<std::pair<int, float>, std::pair<AttentionArgs, std::unique_ptr<AttentionPlan<Bf16>>>> plans_;
};

template <typename Kernel>
void run_layers(const DecoderArgs& args) {
    const int64_t tokens = args.num_tokens, size = args.size;
    const int threads = args.attention.num_threads;
    const LayerArgs &first = args.layers[0], &last = args.layers[args.num_layers - 1];
    const bool all_sampled = args.num_rows == tokens;
    auto* hidden = static_cast<Bf16*>(args.hidden);
    auto* normed = static_cast<Bf16*>(args.out);
    auto* update = static_cast<Bf16*>(args.scratch);
    auto* qkv = update + tokens * size;
    auto* attended = qkv + tokens * first.qkv.n;
    auto* gates = attended + tokens * first.o.k;
    auto* gated = gates + tokens * first.gate_up.n;
    const auto make_plans = [&](AttentionArgs attention) {
        attention.q = qkv;
        attention.out = attended;
        return LayerPlans<Kernel>(attention);
    };
    LayerPlans<Kernel> layer_plans = make_plans(args.attention), last_layer_plans = make_plans(args.rows_attention);
    for (int l = 0; l < args.num_layers; l++) layer_plans.add(args.layers[l]);
    if (!all_sampled) last_layer_plans.add(last);
    std::vector<SoftmaxState> splits(std::max(layer_plans.max_num_splits(), last_layer_plans.max_num_splits()));
    run_team(threads, args.num_layers * LOOPS_PER_LAYER + FINAL_LOOPS, [&](TeamThread& team) {
        int64_t rows = tokens;
        for (int l = 0; l < args.num_layers; l++) {
            const LayerArgs& layer = args.layers[l];
            rms_norm<Bf16>(team, hidden, l ? update : nullptr, static_cast<const Bf16*>(layer.input_norm), normed,
                tokens, int(size), args.eps);
            gemm(team, normed, packed_weights(layer.qkv), qkv, tokens, threads);
            RopeArgs rope = args.rope;
            rope.qkv = qkv;
            rope.kv = layer.kv;
            rope.q_weight = layer.q_norm;
            rope.k_weight = layer.k_norm;
            rope_and_store_kv<Bf16>(team, rope);
            const LayerPlans<Kernel>* plan = &layer_plans;
            if (&layer == &last) {
                check_finite(team, qkv, tokens, layer.qkv.n, nullptr, args.is_finite);
                if (!all_sampled) {
                    compact_rows(team, hidden, size, size, args.rows, args.num_rows);
                    compact_rows(team, qkv, layer.qkv.n, layer.o.k, args.rows, args.num_rows);
                    plan = &last_layer_plans;
                    rows = args.num_rows;
                }
            }
            attend<Bf16, Kernel>(team, plan->of(layer), layer.kv, splits);
            gemm(team, attended, packed_weights(layer.o), update, rows, threads);
            rms_norm<Bf16>(team, hidden, update, static_cast<const Bf16*>(layer.post_norm), normed, rows, int(size),
                args.eps);
            gemm(team, normed, packed_weights(layer.gate_up), gates, rows, threads);
            silu_gate<Bf16>(team, gates, gated, rows, int(layer.down.k));
            gemm(team, gated, packed_weights(layer.down), update, rows, threads);
        }
        rms_norm<Bf16>(team, hidden, update, static_cast<const Bf16*>(args.final_norm), normed, rows, int(size),
            args.eps);
        check_finite(team, normed, rows, size, args.rows, args.is_finite);
    });
}

}  // namespace

}  // namespace baton

extern "C" {

// Returns 1 if products use the bfloat16 dot product.
int32_t baton_has_bf16_dot() {
#ifdef BATON_HAS_BF16_DOT
    return 1;
#else
    return 0;
#endif
}

// weights [n, k] bfloat16 -> packed [n / 64 rounded up, k / 2, 64] words.
void baton_pack_weights(const void* weights, void* packed, int64_t n, int64_t k, int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < (n + baton::PANEL - 1) / baton::PANEL; panel++) {
        baton::pack_panel(static_cast<const baton::Bf16*>(weights), n, k, panel, static_cast<uint32_t*>(packed));
    }
}

// x [rows, k] bfloat16 -> out [rows, n] of `dtype`, bfloat16 or float32.
void baton_gemm(const void* x, const baton::GemmArgs* weights, void* out, int64_t rows, int32_t threads,
    int32_t dtype) {
    using namespace baton;
    run_team(threads, 1, [&](TeamThread& team) {
        const auto* input = static_cast<const Bf16*>(x);
        if (dtype == FLOAT32) return gemm(team, input, packed_weights(*weights), static_cast<float*>(out), rows,
            threads);
        gemm(team, input, packed_weights(*weights), static_cast<Bf16*>(out), rows, threads);
    });
}

void baton_decoder_forward(const baton::DecoderArgs* args) {
    using namespace baton;
#ifdef BATON_HAS_BF16_DOT
    const int dim = args->attention.head_dim;
    if (dim % 32 == 0 && dim <= AttentionTileBf16::MAX_DIM) return run_layers<AttentionTileBf16>(*args);
#endif
    run_layers<AttentionTileFloat<Bf16>>(*args);
}
}
