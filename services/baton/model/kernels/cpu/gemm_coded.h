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

// Unpacks 16 inputs of the outputs from `lane` on: four quads of bytes. Always inlined: g++ 12 would call it for 6
// bits, and pass the quads through memory.
template <int LAYOUT, bool HAS_TABLE>
__attribute__((always_inline))
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
// quads and what a product needs. Found by trial with g++ 12.
constexpr int code_vectors_with(int rows) {
    constexpr int OTHERS = NUM_CODE_REGISTERS == 32 ? 13 : SIGNED_BYTES ? 9 : 8;
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
        if (slice.offsets) return multiply_groups<ROWS, true>(rows, row, sums, prefetch);
        multiply_groups<ROWS, false>(rows, row, sums, prefetch);
    }

    template <int ROWS, bool HAS_OFFSETS>
    void multiply_groups(const QuantisedRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        constexpr int VECTORS = code_vectors_with(ROWS);
        const uint8_t* records[ROWS];
        for (int r = 0; r < ROWS; r++) records[r] = rows.record(row + r);
        if (slice.is_first) std::memset(sums, 0, ROWS * PANEL * sizeof(float));
        for (int group = 0; group < slice.inputs / slice.group_size; group++) {
            const GroupPlace at = rows.place(slice.first_input / slice.group_size + group, slice.group_size);
            for (int lane = 0; lane < PANEL; lane += VECTORS * LANES)
                add_group<HAS_OFFSETS, ROWS, VECTORS>(records, at, group, lane, sums + lane, prefetch);
        }
    }

    // sums += the products of one group of inputs, for VECTORS vectors of outputs.
    template <bool HAS_OFFSETS, int ROWS, int VECTORS>
    void add_group(const uint8_t* const (&records)[ROWS], GroupPlace at, int group, int lane, float* sums,
        WeightPrefetch& prefetch) const {
        const int units = slice.group_size / UNIT;
        DotVec dots[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) dots[r][v] = DotVec{} + number_at<int32_t>(records[r] + at.start);
        for (int unit = 0; unit < units; unit++) {
            if (lane == 0) prefetch.fetch();
            for (int v = 0; v < VECTORS; v++) {
                CodeVec quads[QUADS];
                load_unit<LAYOUT, HAS_TABLE>(slice, group * units + unit, lane + v * LANES, quads);
                for (int r = 0; r < ROWS; r++)
                    dots[r][v] = add_unit<BITS>(dots[r][v], quads,
                        reinterpret_cast<const int8_t*>(records[r] + at.codes + unit * UNIT));
            }
        }
        for (int v = 0; v < VECTORS; v++)
            add_scaled<HAS_OFFSETS>(dots, v, records, at, group * PANEL + lane + v * LANES, sums + v * LANES);
    }

    // sums += a group's integer sums times its scales, for one vector of outputs. factor: place of its first factor.
    template <bool HAS_OFFSETS, int ROWS, int VECTORS>
    void add_scaled(const DotVec (&dots)[ROWS][VECTORS], int v, const uint8_t* const (&records)[ROWS], GroupPlace at,
        int factor, float* sums) const {
        const auto scales = load_vector<FactorVec>(slice.scales + factor);
        for (int r = 0; r < ROWS; r++) {
            auto sum = load_vector<FactorVec>(sums + r * PANEL);
            sum += scales * number_at<float>(records[r] + at.scale) * __builtin_convertvector(dots[r][v], FactorVec);
            if constexpr (HAS_OFFSETS)
                sum += load_vector<FactorVec>(slice.offsets + factor) * number_at<float>(records[r] + at.sum);
            std::memcpy(sums + r * PANEL, &sum, sizeof sum);
        }
    }

#ifdef BATON_TILES
    // As multiply, for 16 rows, with tiles.
    void multiply_tile(const QuantisedRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
        alignas(64) int32_t dots[TILE_ROWS * PANEL];
        if (slice.is_first) std::memset(sums, 0, TILE_ROWS * PANEL * sizeof(float));
        for (int group = 0; group < slice.inputs / slice.group_size; group++) {
            for (int unit = 0; unit < slice.group_size / UNIT; unit++) prefetch.fetch();
            const GroupPlace at = rows.place(slice.first_input / slice.group_size + group, slice.group_size);
            clear_sums();
            for (int i = 0; i < slice.group_size; i += TILE_INPUTS) {
                load_x(reinterpret_cast<const int8_t*>(rows.record(row) + at.codes + i), rows.record_bytes);
                add_products(slice.low + size_t(group * slice.group_size + i) / 4 * PANEL);
            }
            store_sums(dots);
            if (slice.offsets)
                add_tile<true>(dots, rows, row, at, group, sums);
            else
                add_tile<false>(dots, rows, row, at, group, sums);
        }
    }

    template <bool HAS_OFFSETS>
    void add_tile(const int32_t* dots, const QuantisedRows& rows, int64_t row, GroupPlace at, int group,
        float* sums) const {
        for (int r = 0; r < TILE_ROWS; r++, dots += PANEL, sums += PANEL) {
            const uint8_t* const records[1] = {rows.record(row + r)};
            for (int lane = 0; lane < PANEL; lane += LANES) {
                const DotVec own[1][1] = {
                    {load_vector<DotVec>(dots + lane) + number_at<int32_t>(records[0] + at.start)}};
                add_scaled<HAS_OFFSETS>(own, 0, records, at, group * PANEL + lane, sums + lane);
            }
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
    int fetches(int inputs) const { return inputs / UNIT; }

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
