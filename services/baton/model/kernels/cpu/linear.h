// A linear layer as the decoder and Python call it: one product for one or several packed weights whose outputs
// lie next to each other. linear.cpp chooses the kernel of each weight's format.
#pragma once

#include <vector>

#include "parallel_for.h"
#include "weight_format.h"

namespace baton {

// weights: `count` of them, each [n_i, k]; n: the sum of all n_i.
struct GemmArgs {
    const PackedWeights* weights;
    int64_t count;
    int64_t n;
    int64_t k;
};

constexpr int64_t GEMM_LOOPS = 2;
constexpr int ROWS_PER_BLOCK = 96;  // rows of x that are multiplied by a panel at a time

// Bytes of scratch that a product of `rows` rows needs per row of x, a multiple of the cache line. x_dtype: see Dtype.
// No product needs more than one of MANY_ROWS rows.
constexpr int64_t MANY_ROWS = INT64_MAX;
int64_t gemm_row_bytes(const GemmArgs& args, int32_t x_dtype, int64_t rows);

// Part of a product: `count` rows of x from `row` on, at most ROWS_PER_BLOCK, times one panel of 64 outputs.
// panel: counted over all weights. next_panel: what the thread most likely multiplies next, -1 if nothing.
struct GemmItem {
    int64_t row;
    int count;
    int64_t panel;
    int64_t next_panel;
};

int64_t total_panels(const GemmArgs& args);

// The two halves of a product: bring the rows of x into the form that the weights need, then multiply each item
// with a PreparedGemm. All threads of the team call prepare_gemm, which has at most one loop; prepare_row does it
// for one row. rows: of the whole x.
void prepare_gemm(TeamThread& team, const GemmArgs& args, const void* x, int32_t x_dtype, int64_t rows,
    void* scratch);
void prepare_row(const GemmArgs& args, const void* x, int32_t x_dtype, int64_t row, int64_t rows, void* scratch);

struct PanelItem;  // see gemm.h

// Multiplies the rows of an item by its panel: sums [count, 64]. x: all rows, in the form that the weight needs.
using MultiplyPanel = void(const PanelItem& item, const void* x, float* sums);

// What all items of one weight in a product share.
struct PreparedWeight {
    const PackedWeights* weights;
    MultiplyPanel* multiply;
    const void* x;
    int64_t first_output;  // among the outputs of all weights
    int64_t panels;
    int64_t panel_bytes;
    int64_t first_slice_bytes;
};

// A product with everything found that its items share, because an item is only a few microseconds of work. Each
// thread has its own. The arguments are those of gemm and must stay valid.
class PreparedGemm {
  public:
    PreparedGemm(const GemmArgs& args, const void* x, int32_t x_dtype, void* out, int32_t out_dtype, int64_t rows,
        const void* scratch);

    void multiply(const GemmItem& item) const;

  private:
    std::vector<PreparedWeight> weights_;
    void* out_;
    int32_t out_dtype_;
    int64_t stride_;
};

// out [rows, n] = x [rows, k] times the weights transposed, plus biases. All threads of the team call it.
// scratch: rows * gemm_row_bytes, aligned to a cache line.
void gemm(TeamThread& team, const GemmArgs& args, const void* x, int32_t x_dtype, void* out, int32_t out_dtype,
    int64_t rows, void* scratch, int threads);

}  // namespace baton
