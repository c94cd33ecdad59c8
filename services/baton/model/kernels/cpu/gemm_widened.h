// Part of gemm.h: multiplies rows of floats by weights that are widened to floats: float32, float16, bfloat16
// where there is no dot product for it, and float8.
#pragma once

#include "gemm.h"
#include "gemm_factors.h"
#include "gemm_rows.h"
#include "simd.h"

namespace baton {

// Loads of weights. A step is what a word or number holds per output: INPUTS inputs of 64 outputs.
struct FloatLanes {
    static constexpr int INPUTS = 1, BYTES = 4;

    template <int INPUT>
    static FloatVec load(const uint8_t* at) {
        return load_vector<FloatVec>(at);
    }
};

struct HalfLanes {
    static constexpr int INPUTS = 1, BYTES = 2;

    template <int INPUT>
    static FloatVec load(const uint8_t* at) {
        return load_halves(at);
    }
};

// Each half of a word is the upper half of a float. With 16 registers the mask is loaded each time: it would take the
// register that six rows need for their inputs, and g++ 12 would move sums to memory and back.
struct Bf16Lanes {
    static constexpr int INPUTS = 2, BYTES = 4;

    static WordVec upper_halves() {
        static constexpr WordVec MASK = WordVec{} + 0xffff0000u;
        return NUM_REGISTERS > 16 ? MASK : *load_again(&MASK);
    }

    template <int INPUT>
    static FloatVec load(const uint8_t* at) {
        const auto words = load_vector<WordVec>(at);
        return FloatVec(INPUT ? words & upper_halves() : words << 16);
    }
};

// Number of vectors of sums per row, for that many rows: as many as fit into the registers, beside one vector
// of weights each, an input and a temporary. A single row uses each weight vector immediately, so it needs only
// one.
constexpr int vectors_with(int rows) {
    int vectors = PANEL / VECTOR_FLOATS;
    while (vectors > 1 && rows * vectors + (rows > 1 ? vectors : 1) + 2 > NUM_REGISTERS) vectors /= 2;
    return vectors;
}

constexpr int passes_with(int rows) { return PANEL / VECTOR_FLOATS / vectors_with(rows); }

// Part of a slice: VECTORS vectors of outputs. first_step: their first step; steps are STEP_BYTES apart.
template <typename Lanes, int VECTORS>
struct WidenedSteps {
    const uint8_t* first_step;
    int inputs;
    bool is_first;

    static constexpr int INPUTS_PER_FETCH = 8, STEP_BYTES = PANEL * Lanes::BYTES;

    // sums += ROWS rows of x times the weights. x, sums: of the first row; rows are `stride` and 64 floats apart.
    template <int ROWS>
    void multiply(const float* x, int64_t stride, float* sums, WeightPrefetch& prefetch) const {
        FloatVec acc[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = is_first ? FloatVec{} : load_vector<FloatVec>(sums + r * PANEL + v * VECTOR_FLOATS);
        const uint8_t* step = first_step;
        for (int input = 0; input < inputs; input += Lanes::INPUTS, step += STEP_BYTES) {
            if (input % INPUTS_PER_FETCH == 0) prefetch.fetch();
            add<0>(acc, step, x + input, stride);
            if constexpr (Lanes::INPUTS == 2) add<1>(acc, step, x + input + 1, stride);
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(sums + r * PANEL + v * VECTOR_FLOATS, acc[r][v]);
    }

    // acc += one input of each row times that input of a step.
    template <int INPUT, int ROWS>
    static void add(FloatVec (&acc)[ROWS][VECTORS], const uint8_t* step, const float* x, int64_t stride) {
        FloatVec lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            lanes[v] = Lanes::template load<INPUT>(step + v * VECTOR_FLOATS * Lanes::BYTES);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] += lanes[v] * x[r * stride];
    }
};

template <typename Lanes>
struct WidenedView {
    const uint8_t* packed;
    int64_t first_input;
    int inputs;
    bool is_first;

    static constexpr int ROWS_PER_TILE = 0;

    template <int ROWS>
    void multiply(const FloatRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        constexpr int VECTORS = vectors_with(ROWS);
        const float* x = rows.values + row * rows.stride + first_input;
        for (int first = 0; first < PANEL; first += VECTORS * VECTOR_FLOATS) {
            const WidenedSteps<Lanes, VECTORS> steps{packed + first * Lanes::BYTES, inputs, is_first};
            steps.template multiply<ROWS>(x, rows.stride, sums + first, prefetch);
        }
    }
};

struct WidenedFormat {
    using Rows = FloatRows;

    const WeightFormat* format;

    explicit WidenedFormat(const WeightFormat& of) : format(&of) {}

    int slice_inputs() const { return baton::slice_inputs(*format); }
    int passes(int rows) const {
        const int rest = rows % ROWS_PER_PASS;
        return rows / ROWS_PER_PASS * passes_with(ROWS_PER_PASS) + (rest ? passes_with(rest) : 0);
    }
    int fetches(int inputs) const { return int(divide_up(inputs, WidenedSteps<FloatLanes, 1>::INPUTS_PER_FETCH)); }
};

template <typename Lanes>
struct Widened : WidenedFormat {
    using WidenedFormat::WidenedFormat;

    struct Workspace {};

    template <typename Body>
    void open(const PanelSlice& slice, int, Workspace&, const Body& body) const {
        body(WidenedView<Lanes>{slice.packed, slice.first_input, slice.inputs, slice.is_first});
    }
};

// float8 numbers in the lowest bytes of words, as floats: to_float of numbers.h in vectors.
inline FloatVec widen_float8(WordVec codes) {
    const WordVec sign = (codes & 0x80u) << 24, size = (codes & 0x7fu) << 20;
    const FloatVec shifted = FloatVec(size + 121 * EXPONENT_ONE) - float_from_bits(121 * EXPONENT_ONE);
    const WordVec normal = size == 0x7f00000u ? WordVec{} + 0x7fc00000u : size + 120 * EXPONENT_ONE;
    return FloatVec(sign | (size < EXPONENT_ONE ? WordVec(shifted) : normal));
}

// A slice of float8 as it is packed: each weight is widened in a register. Products and their order are those of an
// expanded slice, so a row's sums are the same. scales: [groups, 64], or null.
struct Float8View {
    PanelSlice slice;
    const float* scales;
    int group_size;

    static constexpr int INPUTS_PER_FETCH = 8, ROWS_PER_TILE = 0;

    template <int ROWS>
    void multiply(const FloatRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        constexpr int VECTORS = vectors_with(ROWS);
        const float* x = rows.values + row * rows.stride + slice.first_input;
        for (int first = 0; first < PANEL; first += VECTORS * VECTOR_FLOATS) {
            FloatVec acc[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    acc[r][v] = slice.is_first ? FloatVec{} : load_vector<FloatVec>(
                        sums + r * PANEL + first + v * VECTOR_FLOATS);
            for (int begin = 0; begin < slice.inputs; begin += group_size) {
                const int end = std::min(begin + group_size, slice.inputs);
                FloatVec factors[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    factors[v] = scales ? load_vector<FloatVec>(
                        scales + begin / group_size * PANEL + first + v * VECTOR_FLOATS) : FloatVec{} + 1.0f;
                for (int input = begin; input < end; input++) {
                    if (input % INPUTS_PER_FETCH == 0) prefetch.fetch();
                    const uint8_t* words = slice.packed + (size_t(input / 4) * PANEL + first) * 4;
                    FloatVec lanes[VECTORS];
                    for (int v = 0; v < VECTORS; v++)
                        lanes[v] = factors[v] * widen_float8(
                            (load_vector<WordVec>(words + v * VECTOR_BYTES) >> (input % 4 * 8)) & 0xffu);
                    for (int r = 0; r < ROWS; r++)
                        for (int v = 0; v < VECTORS; v++) acc[r][v] += lanes[v] * x[r * rows.stride + input];
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    store(sums + r * PANEL + first + v * VECTOR_FLOATS, acc[r][v]);
        }
    }
};

// For more rows than a pass has, float8 is expanded to floats once per slice, scales included.
struct Float8 : WidenedFormat {
    using WidenedFormat::WidenedFormat;

    struct Workspace {
        alignas(64) float scales[MAX_GROUPS * PANEL];
        alignas(64) float values[CODED_SLICE * PANEL];
    };

    template <typename Body>
    void open(const PanelSlice& slice, int rows, Workspace& workspace, const Body& body) const {
        const int words = int(divide_up(slice.inputs, 4)), size = format->scales.super_size;
        if (size)
            expand_factors(format->scales, slice.packed + words * PANEL * 4, slice.inputs, size, workspace.scales);
        if (rows <= ROWS_PER_PASS)
            return body(Float8View{slice, size ? workspace.scales : nullptr, size ? size : slice.inputs});
        for (int quad = 0; quad < words; quad++) {
            uint32_t packed[PANEL];
            std::memcpy(packed, slice.packed + quad * sizeof packed, sizeof packed);
            const float* scales = size ? workspace.scales + quad * 4 / size * PANEL : nullptr;
            for (int j = 0; j < 4; j++) {
                float* to = workspace.values + (quad * 4 + j) * PANEL;
                for (int lane = 0; lane < PANEL; lane++)
                    to[lane] = to_float(Float8Bits{uint8_t(packed[lane] >> 8 * j)});
                for (int lane = 0; scales && lane < PANEL; lane++) to[lane] *= scales[lane];
            }
        }
        const auto* values = reinterpret_cast<const uint8_t*>(workspace.values);
        body(WidenedView<FloatLanes>{values, slice.first_input, slice.inputs, slice.is_first});
    }
};

}  // namespace baton
