// Runs all layers of a decoder over one step, in one team of threads from the first product to the last norm.
#include <map>
#include <memory>

#include "attention_work.h"
#include "experts.h"

namespace baton {

// A mixture of experts. router: its outputs are one logit an expert.
struct ExpertsArgs {
    GemmArgs router;
    ExpertsGemmArgs gate_up;
    ExpertsGemmArgs down;
    int32_t num_experts;
    int32_t top_k;
    int32_t router_weights;  // see RouterWeights
};

// A layer computes x += multiplier * norm(attention(norm(x))), then the same with its MLP. Any of the four norms
// may be none.
// gate_up, down: of the MLP, unless the layer has experts.
// q_norm, k_norm, norms_all_heads: see RopeArgs. rotary: index into the step's tables, or -1.
// sinks, window, scale: see attention.h. kv: of this layer, see layer_kv.h. table: the block table of its KV.
struct LayerArgs {
    GemmArgs qkv, o, gate_up, down;
    const ExpertsArgs* experts;
    NormArgs before_attention, after_attention, before_mlp, after_mlp;
    NormArgs q_norm, k_norm;
    const float* sinks;
    LayerKv kv;
    int32_t table;
    int32_t window;
    int32_t rotary;
    int32_t norms_all_heads;
    GateArgs gate;
    float scale;
    float multiplier;
};

// hidden [num_tokens, size]: the embeddings; overwritten.
// out [num_tokens, size]: its first num_rows rows receive `rows` after the last norm.
// rows, ascending: the tokens whose output is needed. For all others, the last layer computes only keys and
// values.
// is_finite [num_tokens]: true if a token's last keys and values, and its output if it is in `rows`, are
// finite.
// scratch: room for the intermediate results, see Scratch. gemm_scratch: for the largest product of the step, see
// gemm_row_bytes.
// rotary_tables: of this step, see LayerArgs.
// rows_attention: attention of `rows` only, each as a sequence of one token; unused if `rows` has all tokens.
// rope: what all layers share.
// table_stride: from the blocks of one block table to those of the next, in `tables` of both attentions. The slots
// of `rope` are [block tables, num_tokens].
struct DecoderArgs {
    const LayerArgs* layers;
    const RotaryTable* rotary_tables;
    void* hidden;
    void* out;
    void* scratch;
    void* gemm_scratch;
    uint8_t* is_finite;
    const int64_t* rows;
    int64_t num_rows;
    int64_t num_tokens;
    int64_t table_stride;
    int32_t num_layers;
    int32_t size;
    NormArgs final_norm;
    AttentionArgs attention;
    AttentionArgs rows_attention;
    RopeArgs rope;
};

namespace {

template <typename T>
constexpr int32_t dtype_of = std::is_same_v<T, float> ? FLOAT32 : std::is_same_v<T, Bf16> ? BFLOAT16 : FLOAT16;

constexpr int64_t LOOPS_PER_LAYER = 6 + 2 * GEMM_LOOPS + NUM_ATTENTION_LOOPS + EXPERT_LOOPS, FINAL_LOOPS = 2;

// Attention plans by (window, scale). Most layers share one plan.
template <typename T, typename Kernel>
class LayerPlans {
  public:
    explicit LayerPlans(const AttentionArgs& of) : step_args_(of) {}

    void add(const LayerArgs& layer) {
        auto& [layer_args, plan] = plans_[{layer.window, layer.scale}];
        if (plan) return;
        layer_args = step_args_;
        layer_args.window = layer.window;
        layer_args.scale = layer.scale;
        plan = std::make_unique<AttentionPlan<T>>(layer_args, Kernel::MAX_TILE_ROWS);
    }

    const AttentionPlan<T>& of(const LayerArgs& layer) const { return *plans_.at({layer.window,
        layer.scale}).second; }

    size_t max_split_states() const {
        size_t most = 0;
        for (const auto& [_, plan] : plans_) most = std::max(most, size_t(plan.second->num_split_states));
        return most;
    }

  private:
    AttentionArgs step_args_;
    std::map<std::pair<int, float>, std::pair<AttentionArgs, std::unique_ptr<AttentionPlan<T>>>> plans_;
};

// Intermediate results, one after the other in the step's scratch memory.
//   update [tokens, size]: what a layer's attention or MLP adds to the hidden states.
//   qkv [tokens, qkv.n], attended [tokens, o.k]
//   mlp: [rows, gate_up.n + down.k]; with experts for rows * top_k rows [size + gate_up.n + down.k + size], then
//   the logits of the router.
template <typename T>
struct Scratch {
    T *update, *qkv, *attended, *mlp;

    explicit Scratch(const DecoderArgs& args) {
        const LayerArgs& first = args.layers[0];
        update = static_cast<T*>(args.scratch);
        qkv = update + args.num_tokens * args.size;
        attended = qkv + args.num_tokens * first.qkv.n;
        mlp = attended + args.num_tokens * first.o.k;
    }
};

// The parts of a layer's work that are products.
template <typename T>
struct Products {
    void* scratch;
    int threads;

    template <typename Out>
    void operator()(TeamThread& team, const T* x, const GemmArgs& weights, Out* out, int64_t rows) const {
        gemm(team, weights, x, dtype_of<T>, out, dtype_of<Out>, rows, scratch, threads);
    }

    void experts(TeamThread& team, const T* x, const ExpertsGemmArgs& weights, T* out, const Routing& routing,
        int64_t places, int num_experts) const {
        multiply_experts(team, weights, x, out, dtype_of<T>, routing, places, num_experts, scratch, threads);
    }
};

template <typename T>
void run_mlp(TeamThread& team, const LayerArgs& layer, const T* x, const Scratch<T>& scratch,
    const Products<T>& product, int64_t rows) {
    T *gates = scratch.mlp, *gated = gates + rows * layer.gate_up.n;
    product(team, x, layer.gate_up, gates, rows);
    gate(team, gates, gated, rows, int(layer.down.k), layer.gate);
    product(team, gated, layer.down, scratch.update, rows);
}

template <typename T>
void run_experts(TeamThread& team, const LayerArgs& layer, const T* x, const Scratch<T>& scratch,
    const Products<T>& product, Routing& routing, int64_t rows) {
    const ExpertsArgs& experts = *layer.experts;
    const int top_k = experts.top_k, num_experts = experts.num_experts;
    const int64_t places = rows * top_k, size = experts.router.k, inner = experts.down.experts[0].k;
    T *grouped = scratch.mlp, *gates = grouped + places * size, *gated = gates + places * 2 * inner,
      *outputs = gated + places * inner;
    // Logits are floats and need alignment; the outputs are not written until they have been read.
    float* logits = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(outputs) + 63) / 64 * 64);
    product(team, x, experts.router, logits, rows);
    team.parallel_for_batched(rows, [&](int64_t r) {
        choose_experts(logits + r * num_experts, num_experts, top_k, experts.router_weights,
            &routing.experts[r * top_k], &routing.weights[r * top_k]);
    });
    team.parallel_for(1, [&](int64_t) { group_rows(routing, rows, top_k, num_experts); });
    scatter_rows(team, x, grouped, routing, places, size);
    product.experts(team, grouped, experts.gate_up, gates, routing, places, num_experts);
    gate(team, gates, gated, places, int(inner), layer.gate);
    product.experts(team, gated, experts.down, outputs, routing, places, num_experts);
    gather_rows(team, outputs, scratch.update, routing, rows, top_k, size);
}

template <typename T, typename Kernel>
void run_layers(const DecoderArgs& args) {
    const int64_t tokens = args.num_tokens, size = args.size;
    const int threads = args.attention.num_threads;
    const LayerArgs& last = args.layers[args.num_layers - 1];
    const bool all_sampled = args.num_rows == tokens;
    auto* hidden = static_cast<T*>(args.hidden);
    auto* normed = static_cast<T*>(args.out);
    const Scratch<T> scratch(args);
    const Products<T> product{args.gemm_scratch, threads};
    const auto make_plans = [&](AttentionArgs attention) {
        attention.q = scratch.qkv;
        attention.out = scratch.attended;
        return LayerPlans<T, Kernel>(attention);
    };
    LayerPlans<T, Kernel> layer_plans = make_plans(args.attention), last_layer_plans = make_plans(args.rows_attention);
    Routing routing;
    for (int l = 0; l < args.num_layers; l++) {
        layer_plans.add(args.layers[l]);
        const ExpertsArgs* experts = args.layers[l].experts;
        if (experts) routing.reserve(tokens, experts->top_k, experts->num_experts);
    }
    if (!all_sampled) last_layer_plans.add(last);
    std::vector<SoftmaxState> split_states(
        std::max(layer_plans.max_split_states(), last_layer_plans.max_split_states()));
    run_team(threads, args.num_layers * LOOPS_PER_LAYER + FINAL_LOOPS, [&](TeamThread& team) {
        int64_t rows = tokens;
        const T* added = nullptr;
        NormArgs after_mlp{};
        float multiplier = 1.0f;
        for (int l = 0; l < args.num_layers; l++) {
            const LayerArgs& layer = args.layers[l];
            const auto input = [&](const NormArgs& norm) { return norm.factor ? normed : hidden; };
            add_and_norm(team, hidden, added, after_mlp, multiplier, layer.before_attention, normed, tokens,
                int(size));
            product(team, input(layer.before_attention), layer.qkv, scratch.qkv, tokens);
            RopeArgs rope = args.rope;
            rope.qkv = scratch.qkv;
            rope.kv = layer.kv;
            rope.slots += layer.table * tokens;
            rope.q_norm = layer.q_norm;
            rope.k_norm = layer.k_norm;
            rope.norms_all_heads = layer.norms_all_heads;
            if (layer.rotary >= 0) rope.rotary = args.rotary_tables[layer.rotary];
            if (&layer == &last)
                check_finite(team, scratch.qkv, tokens, layer.qkv.n, nullptr, args.is_finite);
            rope_and_store_kv<T>(team, rope);
            const LayerPlans<T, Kernel>* plan = &layer_plans;
            if (&layer == &last && !all_sampled) {
                compact_rows(team, hidden, size, size, args.rows, args.num_rows);
                compact_rows(team, scratch.qkv, layer.qkv.n, layer.o.k, args.rows, args.num_rows);
                plan = &last_layer_plans;
                rows = args.num_rows;
            }
            const int32_t* tables = args.attention.tables + layer.table * args.table_stride;
            attend<T, Kernel>(team, plan->of(layer), layer.kv, tables, layer.sinks, split_states);
            product(team, static_cast<const T*>(scratch.attended), layer.o, scratch.update, rows);
            multiplier = layer.multiplier;
            add_and_norm(team, hidden, scratch.update, layer.after_attention, multiplier, layer.before_mlp, normed,
                rows, int(size));
            if (layer.experts) {
                run_experts<T>(team, layer, input(layer.before_mlp), scratch, product, routing, rows);
            } else {
                run_mlp<T>(team, layer, input(layer.before_mlp), scratch, product, rows);
            }
            added = scratch.update;
            after_mlp = layer.after_mlp;
        }
        add_and_norm(team, hidden, added, after_mlp, multiplier, args.final_norm, normed, rows, int(size));
        check_finite(team, normed, rows, size, args.rows, args.is_finite);
    });
}

}  // namespace

}  // namespace baton

extern "C" {

void baton_decoder_forward(const baton::DecoderArgs* args) {
    using namespace baton;
    if (args->rope.dtype == FLOAT32) return run_layers<float, AttentionTileFloat<float>>(*args);
    if (args->rope.dtype == FLOAT16) return run_layers<Fp16, AttentionTileFloat<Fp16>>(*args);
#ifdef BATON_HAS_BF16_DOT
    const int dim = args->attention.head_dim;
    if (dim % 32 == 0 && dim <= AttentionTileBf16::MAX_DIM) return run_layers<Bf16, AttentionTileBf16>(*args);
#endif
    run_layers<Bf16, AttentionTileFloat<Bf16>>(*args);
}
}
