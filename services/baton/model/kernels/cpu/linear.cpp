// Chooses the kernel of each weight's format, and exports packing and products.
#include "linear.h"

#include "bf16_floats.h"
#include "gemm_bf16.h"
#include "gemm_coded.h"
#include "gemm_pack.h"
#include "gemm_unpack.h"
#include "gemm_widened.h"

namespace baton {
namespace {

// How a weight needs the rows of x. group_size, shift: of quantised rows, see quantise_row. order: of the weight.
struct RowsFormat {
    enum { AS_THEY_ARE, WIDENED, QUANTISED } form;
    int group_size;
    int shift;
    const int32_t* order;

    bool operator==(const RowsFormat& other) const {
        return form == other.form && group_size == other.group_size && shift == other.shift && order == other.order;
    }
};

// A kernel for bfloat16 times bfloat16: with the dot product, or with floats and the same bits.
enum class Bf16Kernel { NONE, DOT, FLOATS };

Bf16Kernel bf16_kernel([[maybe_unused]] const WeightFormat& format, [[maybe_unused]] int32_t x_dtype,
    [[maybe_unused]] int64_t rows) {
#ifdef BATON_HAS_BF16_DOT
    constexpr int64_t MIN_FLOAT_ROWS = 4;  // the dot product of fewer is fast enough: it waits for memory
    if (format.kind == WEIGHT_BFLOAT16 && x_dtype == BFLOAT16)
        return rows >= MIN_FLOAT_ROWS && prefers_floats() ? Bf16Kernel::FLOATS : Bf16Kernel::DOT;
#endif
    return Bf16Kernel::NONE;
}

// rows: of the whole product.
RowsFormat rows_format(const PackedWeights& weights, int32_t x_dtype, int64_t rows) {
    const WeightFormat& format = weights.format;
    if (format.kind == CODED)
        return {RowsFormat::QUANTISED, format.group_size, code_bias(format.bits) - format.zero_point, weights.order};
    const bool is_dot = bf16_kernel(format, x_dtype, rows) == Bf16Kernel::DOT;
    return {is_dot ? RowsFormat::AS_THEY_ARE : RowsFormat::WIDENED, 0, 0, nullptr};
}

int64_t row_bytes(const RowsFormat& format, int64_t k) {
    switch (format.form) {
        case RowsFormat::AS_THEY_ARE: return 0;
        case RowsFormat::WIDENED: return float_row_stride(k) * int64_t(sizeof(float));
        default: return QuantisedRows::of(nullptr, k, format.group_size).record_bytes;
    }
}

// Calls body(format, bytes per row before it) for each form of the rows that the weights need, without repeats.
template <typename Body>
void for_each_rows_format(const GemmArgs& args, int32_t x_dtype, int64_t rows, const Body& body) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < args.count; i++) {
        const RowsFormat format = rows_format(args.weights[i], x_dtype, rows);
        bool is_new = format.form != RowsFormat::AS_THEY_ARE;
        for (int64_t j = 0; j < i; j++) is_new &= !(format == rows_format(args.weights[j], x_dtype, rows));
        if (!is_new) continue;
        body(format, bytes);
        bytes += row_bytes(format, args.k);
    }
}

// Scratch bytes per row that lie before the rows in this form.
int64_t bytes_before(const GemmArgs& args, int32_t x_dtype, int64_t rows, const RowsFormat& wanted) {
    int64_t found = 0;
    for_each_rows_format(args, x_dtype, rows, [&](const RowsFormat& format, int64_t before) {
        if (format == wanted) found = before;
    });
    return found;
}

// The row in the order of a weight's inputs, valid until the thread's next call.
template <typename T>
const T* in_order(const T* row, int64_t k, const int32_t* order) {
    if (!order) return row;
    thread_local std::vector<T> ordered;
    ordered.resize(size_t(k));
    for (int64_t i = 0; i < k; i++) ordered[size_t(i)] = row[order[i]];
    return ordered.data();
}

template <typename T>
void prepare_row_of(const GemmArgs& args, const T* x, int32_t x_dtype, int64_t row, int64_t rows, uint8_t* scratch) {
    for_each_rows_format(args, x_dtype, rows, [&](const RowsFormat& format, int64_t before) {
        uint8_t* to = scratch + before * rows;
        if (format.form == RowsFormat::WIDENED)
            return widen_row(x + row * args.k, args.k, reinterpret_cast<float*>(to) + row * float_row_stride(args.k));
        quantise_row(in_order(x + row * args.k, args.k, format.order), row, format.group_size, format.shift,
            QuantisedRows::of(to, args.k, format.group_size));
    });
}

template <typename Format>
void multiply_with(const PanelItem& item, const void* x, float* sums) {
    const WeightFormat& format = item.weights.format;
    multiply_panel(Format(format), Format::Rows::of(x, item.weights.k, format.group_size), item, sums);
}

MultiplyPanel* kernel_of(const WeightFormat& format, [[maybe_unused]] int32_t x_dtype,
    [[maybe_unused]] int64_t rows) {
#ifdef BATON_HAS_BF16_DOT
    switch (bf16_kernel(format, x_dtype, rows)) {
        case Bf16Kernel::DOT: return multiply_with<Bf16Dot>;
        case Bf16Kernel::FLOATS: return multiply_with<Bf16Floats>;
        default: break;
    }
#endif
    switch (format.kind) {
        case WEIGHT_FLOAT32: return multiply_with<Widened<FloatLanes>>;
        case WEIGHT_FLOAT16: return multiply_with<Widened<HalfLanes>>;
        case WEIGHT_BFLOAT16: return multiply_with<Widened<Bf16Lanes>>;
        case WEIGHT_FLOAT8: return multiply_with<Float8>;
        default: break;
    }
    if (format.has_table) return multiply_with<Coded<4, true>>;
    switch (format.bits) {
        case 4: return multiply_with<Coded<4>>;
        case 5: return multiply_with<Coded<5>>;
        case 6: return multiply_with<Coded<6>>;
        default: return multiply_with<Coded<8>>;
    }
}

// Bytes of adjacent panels that a thread multiplies by few rows at a time: a stream that the hardware prefetches,
// which it would have to find again at each panel otherwise. Not tuned.
constexpr int64_t RUN_BYTES = 256 * 1024;
constexpr int64_t RUNS_PER_THREAD = 4;  // so that threads end together

// Number of adjacent panels that a thread takes at a time.
int64_t panels_of_run(const GemmArgs& args, int64_t rows, int64_t panels, int threads) {
    if (rows > ROWS_PER_PASS) return 1;
    const int64_t bytes = panel_bytes(args.weights->format, args.k);
    return std::max<int64_t>(1, std::min(RUN_BYTES / bytes, panels / (RUNS_PER_THREAD * threads)));
}

// The weight that a panel of all weights together belongs to; `panel` becomes its panel.
const PreparedWeight& find_weight(const std::vector<PreparedWeight>& weights, int64_t& panel) {
    const PreparedWeight* weight = weights.data();
    for (; panel >= weight->panels; weight++) panel -= weight->panels;
    return *weight;
}

}  // namespace

int64_t gemm_row_bytes(const GemmArgs& args, int32_t x_dtype, int64_t rows) {
    int64_t bytes = 0;
    for_each_rows_format(args, x_dtype, rows, [&](const RowsFormat& format, int64_t before) {
        bytes = before + row_bytes(format, args.k);
    });
    return bytes;
}

int64_t total_panels(const GemmArgs& args) {
    int64_t panels = 0;
    for (int64_t i = 0; i < args.count; i++) panels += args.weights[i].panels();
    return panels;
}

void prepare_gemm(TeamThread& team, const GemmArgs& args, const void* x, int32_t x_dtype, int64_t rows,
    void* scratch) {
    if (!gemm_row_bytes(args, x_dtype, rows)) return;
    team.parallel_for_batched(rows, [&](int64_t row) { prepare_row(args, x, x_dtype, row, rows, scratch); });
}

void prepare_row(const GemmArgs& args, const void* x, int32_t x_dtype, int64_t row, int64_t rows, void* scratch) {
    dispatch_dtype(x_dtype, [&](auto one) {
        prepare_row_of(args, static_cast<const decltype(one)*>(x), x_dtype, row, rows, static_cast<uint8_t*>(scratch));
    });
}

PreparedGemm::PreparedGemm(const GemmArgs& args, const void* x, int32_t x_dtype, void* out, int32_t out_dtype,
    int64_t rows, const void* scratch)
    : out_(out), out_dtype_(out_dtype), stride_(args.n) {
    weights_.reserve(size_t(args.count));
    for (int64_t i = 0, first = 0; i < args.count; first += args.weights[i++].n) {
        const PackedWeights& own = args.weights[i];
        const RowsFormat needed = rows_format(own, x_dtype, rows);
        const bool as_they_are = needed.form == RowsFormat::AS_THEY_ARE;
        const auto* prepared = static_cast<const uint8_t*>(scratch) + bytes_before(args, x_dtype, rows, needed) * rows;
        weights_.push_back({&own, kernel_of(own.format, x_dtype, rows), as_they_are ? x : prepared, first, own.panels(),
            panel_bytes(own.format, own.k),
            slice_bytes(own.format, int(std::min<int64_t>(own.k, slice_inputs(own.format))))});
    }
}

void PreparedGemm::multiply(const GemmItem& item) const {
    alignas(64) float sums[ROWS_PER_BLOCK * PANEL];
    int64_t panel = item.panel, next_panel = item.next_panel;
    const PreparedWeight& weight = find_weight(weights_, panel);
    PanelItem part{*weight.weights, weight.weights->packed + panel * weight.panel_bytes, panel * PANEL, item.row,
        item.count, nullptr, 0};
    if (next_panel >= 0) {
        const PreparedWeight& next = find_weight(weights_, next_panel);
        part.next = next.weights->packed + next_panel * next.panel_bytes;
        part.next_bytes = next.first_slice_bytes;
    }
    weight.multiply(part, weight.x, sums);
    dispatch_dtype(out_dtype_, [&](auto one) {
        write_outputs(part, sums, static_cast<decltype(one)*>(out_) + weight.first_output, stride_);
    });
}

void gemm(TeamThread& team, const GemmArgs& args, const void* x, int32_t x_dtype, void* out, int32_t out_dtype,
    int64_t rows, void* scratch, int threads) {
    prepare_gemm(team, args, x, x_dtype, rows, scratch);
    const int64_t panels = total_panels(args), blocks = divide_up(rows, ROWS_PER_BLOCK);
    const int64_t run = panels_of_run(args, rows, panels, threads), runs = divide_up(panels, run);
    const PreparedGemm prepared(args, x, x_dtype, out, out_dtype, rows, scratch);
    team.parallel_for(blocks * runs, [&](int64_t i) {
        const int64_t block = i / runs, row = block * ROWS_PER_BLOCK;
        const int64_t begin = i % runs * run, end = std::min(panels, begin + run);
        for (int64_t panel = begin; panel < end; panel++) {
            const int64_t next = panel + 1 < end ? panel + 1 : begin + run * threads;
            const int64_t next_panel = block + 1 < blocks || next < panels ? next % panels : -1;
            prepared.multiply({row, int(std::min<int64_t>(ROWS_PER_BLOCK, rows - row)), panel, next_panel});
        }
    });
}

}  // namespace baton

extern "C" {

// Returns 1 if the processor has the dot product of bfloat16 pairs.
int32_t baton_has_bf16_dot() {
#ifdef BATON_HAS_BF16_DOT
    return 1;
#else
    return 0;
#endif
}

// Bytes of `weights` packed.
int64_t baton_packed_bytes(const baton::PackedWeights* weights) {
    return weights->panels() * baton::panel_bytes(weights->format, weights->k);
}

// Packs `from` into `packed`, baton_packed_bytes long.
void baton_pack_weights(const baton::PackedWeights* weights, const baton::UnpackedWeights* from, void* packed,
    int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < weights->panels(); panel++) {
        baton::pack_panel(*weights, *from, panel,
            static_cast<uint8_t*>(packed) + panel * baton::panel_bytes(weights->format, weights->k));
    }
}

// to [count, k] = the weights of these outputs. Returns 0, and writes nothing, if there is no such output.
int32_t baton_unpack_rows(const baton::PackedWeights* weights, const int64_t* outputs, int64_t count, float* to,
    int32_t threads) {
    const auto exists = [&](int64_t output) { return output >= 0 && output < weights->n; };
    if (!std::all_of(outputs, outputs + count, exists)) return 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (count * weights->k > baton::MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i++) baton::unpack_row(*weights, outputs[i], to + i * weights->k);
    return 1;
}

int64_t baton_gemm_row_bytes(const baton::GemmArgs* args, int32_t x_dtype) {
    return baton::gemm_row_bytes(*args, x_dtype, baton::MANY_ROWS);
}

void baton_gemm(const baton::GemmArgs* args, const void* x, int32_t x_dtype, void* out, int32_t out_dtype,
    int64_t rows, void* scratch, int32_t threads) {
    baton::run_team(threads, baton::GEMM_LOOPS, [&](baton::TeamThread& team) {
        baton::gemm(team, *args, x, x_dtype, out, out_dtype, rows, scratch, threads);
    });
}
}
