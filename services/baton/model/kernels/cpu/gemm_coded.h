// Part of gemm.h: multiplies quantised rows by weights of 4-, 5-, 6- or 8-bit codes, in integers. After each group
// of inputs the integer sums are scaled and added to the sums in float.
//
// For up to six rows the codes are unpacked as they are read. For more, a slice is unpacked once into bytes.
#pragma once

#include "gemm.h"
#include "gemm_factors.h"
#include "gemm_rows.h"
#include "int_dot.h"
#include "tiles.h"

namespace baton {

// A slice of codes of LAYOUT bits. scales, offsets: [groups, 64]; offsets may be null.
struct CodedSlice {
    const uint32_t* low;
    const uint32_t* high;
    const uint8_t* table;
    const float* scales;
    const float* offsets;
    int64_t first_input;
    int inputs;
    int group_size;
    bool is_first;
};

// Unpacks 16 inputs of the outputs from `lane` on: four quads of bytes.
template <int LAYOUT, bool HAS_TABLE>
inline void load_unit(const CodedSlice& slice, int unit, int lane, CodeVec (&quads)[QUADS]) {
    if constexpr (LAYOUT == 8) {
        for (int q = 0; q < QUADS; q++)
            quads[q] = load_vector<CodeVec>(slice.low + size_t(unit * QUADS + q) * PANEL + lane);
        return;
    }
    for (int half = 0; half < 2; half++) {
        const auto words = load_vector<CodeVec>(slice.low + size_t(unit * 2 + half) * PANEL + lane);
        quads[2 * half] = words & 0x0f0f0f0fu;
        quads[2 * half + 1] = (words >> 4) & 0x0f0f0f0fu;
    }
    if constexpr (LAYOUT == 5) {
        const auto high = load_vector<CodeVec>(slice.high + size_t(unit / 2) * PANEL + lane) >> (unit % 2 * QUADS);
        for (int q = 0; q < QUADS; q++) quads[q] |= (high << (4 - q)) & 0x10101010u;
    }
    if constexpr (LAYOUT == 6) {
        const auto high = load_vector<CodeVec>(slice.high + size_t(unit) * PANEL + lane);
        for (int q = 0; q < 2; q++) quads[q] |= (high << (4 - 2 * q)) & 0x30303030u;
        for (int q = 2; q < QUADS; q++) quads[q] |= (high >> (2 * q - 4)) & 0x30303030u;
    }
    if constexpr (HAS_TABLE)
        for (int q = 0; q < QUADS; q++) quads[q] = look_up(quads[q], slice.table);
}

// Number of vectors of integer sums per row, for that many rows: as many as fit into the registers, beside four
// quads and what a product needs. Found by counting the spills of g++ 12.
constexpr int code_vectors_with(int rows) {
    constexpr int OTHERS = NUM_CODE_REGISTERS == 32 ? 13 : 8;
    int vectors = PANEL / LANES;
    while (vectors > 1 && rows * vectors + OTHERS > NUM_CODE_REGISTERS) vectors /= 2;
    return vectors;
}

template <int LAYOUT, bool HAS_TABLE, int BITS>
struct CodedView {
    CodedSlice slice;
    bool uses_tiles = false;

    static constexpr int ROWS_PER_TILE = LAYOUT == 8 ? TILE_ROWS : 0;

    template <int ROWS>
    void multiply(const QuantisedRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        constexpr int VECTORS = code_vectors_with(ROWS);
        const int groups = slice.inputs / slice.group_size;
        for (int group = 0; group < groups; group++) {
            prefetch.fetch();
            for (int lane = 0; lane < PANEL; lane += VECTORS * LANES)
                add_group<ROWS, VECTORS>(rows, row, group, lane, sums);
        }
    }

    // sums += the products of one group of inputs, for VECTORS vectors of outputs.
    template <int ROWS, int VECTORS>
    void add_group(const QuantisedRows& rows, int64_t row, int group, int lane, float* sums) const {
        const int64_t at = slice.first_input / slice.group_size + group;
        const int units = slice.group_size / UNIT;
        DotVec dots[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) dots[r][v] = DotVec{} + rows.starts(row + r)[at];
        for (int unit = group * units; unit < (group + 1) * units; unit++) {
            for (int v = 0; v < VECTORS; v++) {
                CodeVec quads[QUADS];
                load_unit<LAYOUT, HAS_TABLE>(slice, unit, lane + v * LANES, quads);
                for (int r = 0; r < ROWS; r++)
                    dots[r][v] = add_unit<BITS>(dots[r][v], quads,
                        rows.codes(row + r) + slice.first_input + unit * UNIT);
            }
        }
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < ROWS; r++)
                add_scaled(dots[r][v], rows, row + r, group, lane + v * LANES, sums + r * PANEL);
    }

    // sums [64] += a group's integer sums of one row times its scales, for the outputs from `lane` on.
    void add_scaled(DotVec dots, const QuantisedRows& rows, int64_t row, int group, int lane, float* sums) const {
        const int64_t at = slice.first_input / slice.group_size + group;
        const auto scales = load_vector<FactorVec>(slice.scales + group * PANEL + lane);
        FactorVec sum = slice.is_first && group == 0 ? FactorVec{} : load_vector<FactorVec>(sums + lane);
        sum += scales * rows.scales(row)[at] * __builtin_convertvector(dots, FactorVec);
        if (slice.offsets) sum += load_vector<FactorVec>(slice.offsets + group * PANEL + lane) * rows.sums(row)[at];
        std::memcpy(sums + lane, &sum, sizeof sum);
    }

#ifdef BATON_TILES
    // As multiply, for 16 rows, with tiles.
    void multiply_tile(const QuantisedRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        alignas(64) int32_t dots[TILE_ROWS * PANEL];
        for (int group = 0; group < slice.inputs / slice.group_size; group++) {
            prefetch.fetch();
            clear_sums();
            for (int i = group * slice.group_size; i < (group + 1) * slice.group_size; i += TILE_INPUTS) {
                load_x(rows.codes(row) + slice.first_input + i, rows.record_bytes);
                add_products(slice.low + size_t(i / 4) * PANEL);
            }
            store_sums(dots);
            const int64_t at = slice.first_input / slice.group_size + group;
            for (int r = 0; r < TILE_ROWS; r++)
                for (int lane = 0; lane < PANEL; lane += LANES)
                    add_scaled(load_vector<DotVec>(dots + r * PANEL + lane) + rows.starts(row + r)[at], rows, row + r,
                        group, lane, sums + r * PANEL);
        }
    }
#endif
};

template <int LAYOUT, bool HAS_TABLE = false>
struct Coded {
    using Rows = QuantisedRows;

    static constexpr int BITS = dot_bits(HAS_TABLE ? 5 : LAYOUT);

    const WeightFormat* format;

    struct Workspace {
        alignas(64) float scales[MAX_GROUPS * PANEL];
        alignas(64) float offsets[MAX_GROUPS * PANEL];
        alignas(64) uint32_t bytes[LAYOUT == 8 ? 1 : CODED_SLICE / 4 * PANEL];
    };

    explicit Coded(const WeightFormat& of) : format(&of) {}

    int slice_inputs() const { return CODED_SLICE; }
    int passes(int rows) const { return int(divide_up(rows, TILE_ROWS ? TILE_ROWS : ROWS_PER_PASS)); }
    int fetches(int inputs) const { return inputs / format->group_size; }

    template <typename Body>
    void open(const PanelSlice& slice, int rows, Workspace& workspace, const Body& body) const {
        const auto* low = reinterpret_cast<const uint32_t*>(slice.packed);
        const uint32_t* high = low + low_words(LAYOUT, slice.inputs);
        const auto* factors = reinterpret_cast<const uint8_t*>(high + high_words(LAYOUT, slice.inputs));
        const int size = format->group_size;
        const bool has_offsets = format->offsets.super_size != 0;
        expand_factors(format->scales, factors, slice.inputs, size, workspace.scales);
        if (has_offsets)
            expand_factors(format->offsets, factors + factor_bytes(format->scales, slice.inputs, size), slice.inputs,
                size, workspace.offsets);
        CodedSlice coded{low, high, format->table, workspace.scales, has_offsets ? workspace.offsets : nullptr,
            slice.first_input, slice.inputs, size, slice.is_first};
        if (rows <= ROWS_PER_PASS) {
            fetch_next_factors(factors, slice.bytes, slice.packed);
            return body(CodedView<LAYOUT, HAS_TABLE, BITS>{coded});
        }
        if (LAYOUT != 8) {
            unpack(coded, workspace.bytes);
            coded.low = workspace.bytes;
        }
        multiply_bytes(CodedView<8, false, BITS>{coded}, rows, body);
    }

    // Factors are read before the codes that precede them in memory, where the hardware prefetcher has not been. So
    // those of the next slice are fetched while this one is multiplied.
    static void fetch_next_factors(const uint8_t* factors, int64_t bytes, const uint8_t* packed) {
        for (const uint8_t* end = packed + bytes; factors < end; factors += CACHE_LINE_BYTES)
            __builtin_prefetch(factors + bytes, 0, 3);
    }

    template <typename View, typename Body>
    static void multiply_bytes(View view, [[maybe_unused]] int rows, const Body& body) {
#ifdef BATON_TILES
        view.uses_tiles = rows >= TILE_ROWS && has_tiles();
        if (view.uses_tiles) open_tiles(std::min(view.slice.group_size, TILE_INPUTS));
        body(view);
        if (view.uses_tiles) close_tiles();
#else
        body(view);
#endif
    }

    static void unpack(const CodedSlice& slice, uint32_t* bytes) {
        for (int unit = 0; unit < slice.inputs / UNIT; unit++) {
            for (int lane = 0; lane < PANEL; lane += LANES) {
                CodeVec quads[QUADS];
                load_unit<LAYOUT, HAS_TABLE>(slice, unit, lane, quads);
                for (int q = 0; q < QUADS; q++)
                    std::memcpy(bytes + (unit * QUADS + q) * PANEL + lane, &quads[q], sizeof quads[q]);
            }
        }
    }
};

}  // namespace baton
