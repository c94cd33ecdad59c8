// Runs all layers of a decoder over one step, in one team of threads from the first product to the last norm.
#include <map>
#include <memory>

#include "attention_work.h"
#include "layers.h"
#include "linear.h"

namespace baton {

// q_norm, k_norm: [head_dim] or null; kv: this layer's KV, see attention.h; window, scale: as there.
struct LayerArgs {
    GemmArgs qkv, o, gate_up, down;
    const void* input_norm;
    const void* post_norm;
    const void* q_norm;
    const void* k_norm;
    void* kv;
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
// gemm_scratch: num_tokens times the largest gemm_row_bytes of all products.
// rows_attention: attention of `rows` only, each as a sequence of one token; unused if `rows` has all tokens.
struct DecoderArgs {
    const LayerArgs* layers;
    const void* final_norm;
    void* hidden;
    void* out;
    void* scratch;
    void* gemm_scratch;
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

constexpr int64_t LOOPS_PER_LAYER = 4 + 4 * GEMM_LOOPS + NUM_ATTENTION_LOOPS, FINAL_LOOPS = 5;

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
    const auto multiply = [&](TeamThread& team, const Bf16* x, const GemmArgs& weights, Bf16* out, int64_t rows) {
        gemm(team, weights, x, BFLOAT16, out, BFLOAT16, rows, args.gemm_scratch, threads);
    };
    run_team(threads, args.num_layers * LOOPS_PER_LAYER + FINAL_LOOPS, [&](TeamThread& team) {
        int64_t rows = tokens;
        for (int l = 0; l < args.num_layers; l++) {
            const LayerArgs& layer = args.layers[l];
            rms_norm<Bf16>(team, hidden, l ? update : nullptr, static_cast<const Bf16*>(layer.input_norm), normed,
                tokens, int(size), args.eps);
            multiply(team, normed, layer.qkv, qkv, tokens);
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
            attend<Bf16, Kernel>(team, plan->of(layer), static_cast<const Bf16*>(layer.kv), splits);
            multiply(team, attended, layer.o, update, rows);
            rms_norm<Bf16>(team, hidden, update, static_cast<const Bf16*>(layer.post_norm), normed, rows, int(size),
                args.eps);
            multiply(team, normed, layer.gate_up, gates, rows);
            silu_gate<Bf16>(team, gates, gated, rows, int(layer.down.k));
            multiply(team, gated, layer.down, update, rows);
        }
        rms_norm<Bf16>(team, hidden, update, static_cast<const Bf16*>(args.final_norm), normed, rows, int(size),
            args.eps);
        check_finite(team, normed, rows, size, args.rows, args.is_finite);
    });
}

}  // namespace

}  // namespace baton

extern "C" {

void baton_decoder_forward(const baton::DecoderArgs* args) {
    using namespace baton;
#ifdef BATON_HAS_BF16_DOT
    const int dim = args->attention.head_dim;
    if (dim % 32 == 0 && dim <= AttentionTileBf16::MAX_DIM) return run_layers<AttentionTileBf16>(*args);
#endif
    run_layers<AttentionTileFloat<Bf16>>(*args);
}
}
