// Part of gemm.h: multiplies bfloat16 rows by bfloat16 weights, with the dot product of pairs (AVX512-BF16) or, where
// that is slower, with products of floats that give the same bits. 24 vectors of sums stay in registers.
#pragma once

#include "gemm.h"
#include "gemm_rows.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

// What both products share. acc: the sums of ROWS rows, in registers.
struct Bf16Format {
    static constexpr int VECTOR = 16, VECTORS = PANEL / VECTOR, PAIRS_PER_FETCH = 4;

    template <int ROWS>
    static void load_sums(__m512 (&acc)[ROWS][VECTORS], const float* sums, bool is_first) {
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++)
                acc[r][v] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
    }

    template <int ROWS>
    static void save_sums(const __m512 (&acc)[ROWS][VECTORS], float* sums) {
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, acc[r][v]);
    }

    int passes(int rows) const { return int(divide_up(rows, ROWS_PER_PASS)); }
    int fetches(int inputs) const { return int(divide_up(inputs / 2, PAIRS_PER_FETCH)); }
};

struct Bf16Dot : Bf16Format {
    using Rows = Bf16Rows;
    struct Workspace {};

    explicit Bf16Dot(const WeightFormat&) {}

    struct View {
        PanelSlice slice;

        static constexpr int ROWS_PER_TILE = 0;

        template <int ROWS>
        void multiply(const Bf16Rows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
            const Bf16* x = rows.values + row * rows.stride + slice.first_input;
            __m512 acc[ROWS][VECTORS];
            load_sums(acc, sums, slice.is_first);
            for (int pair = 0; pair < slice.inputs / 2; pair++) {
                if (pair % PAIRS_PER_FETCH == 0) prefetch.fetch();
                __m512bh lanes[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    lanes[v] = __m512bh(_mm512_loadu_si512(slice.packed + (size_t(pair) * PANEL + v * VECTOR) * 4));
                for (int r = 0; r < ROWS; r++) {
                    const auto value = __m512bh(_mm512_set1_epi32(int(load_bf16_pair(x + r * rows.stride + 2 * pair))));
                    for (int v = 0; v < VECTORS; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], lanes[v], value);
                }
            }
            save_sums(acc, sums);
        }
    };

    int slice_inputs() const { return BF16_SLICE; }

    template <typename Body>
    void open(const PanelSlice& slice, int, Workspace&, const Body& body) const {
        body(View{slice});
    }
};

// Two products of floats, the upper half first (see DotRounding). bf16_floats.h measures which is faster. For many rows
// a slice is widened to floats once.
struct Bf16Floats : Bf16Format {
    using Rows = FloatRows;

    // 32 KiB as floats: stays in the L1 cache, beside the inputs of six rows.
    static constexpr int SLICE = 128, MIN_WIDENED_ROWS = 2 * ROWS_PER_PASS + 1;

    struct Workspace {
        alignas(64) float values[SLICE * PANEL];
    };

    explicit Bf16Floats(const WeightFormat&) {}

    // One vector of weights; half: 1 is the upper half of its words.
    static __m512 widen(const uint8_t* words, int half) {
        const __m512i packed = _mm512_loadu_si512(words);
        return _mm512_castsi512_ps(half ? _mm512_and_si512(packed, _mm512_set1_epi32(int(0xffff0000)))
                                        : _mm512_slli_epi32(packed, 16));
    }

    // WIDENED: `values` has the slice as floats.
    template <bool WIDENED>
    struct View {
        PanelSlice slice;
        const float* values;

        static constexpr int ROWS_PER_TILE = 0;

        template <int ROWS>
        void multiply(const FloatRows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
            const float* x = rows.values + row * rows.stride + slice.first_input;
            __m512 acc[ROWS][VECTORS];
            load_sums(acc, sums, slice.is_first);
            for (int pair = 0; pair < slice.inputs / 2; pair++) {
                if (pair % PAIRS_PER_FETCH == 0) prefetch.fetch();
                add<1>(acc, x, rows.stride, pair);
                add<0>(acc, x, rows.stride, pair);
            }
            save_sums(acc, sums);
        }

        template <int HALF, int ROWS>
        void add(__m512 (&acc)[ROWS][VECTORS], const float* x, int64_t stride, int pair) const {
            __m512 lanes[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                if constexpr (WIDENED)
                    lanes[v] = _mm512_load_ps(values + (2 * pair + HALF) * PANEL + v * VECTOR);
                else
                    lanes[v] = widen(slice.packed + (size_t(pair) * PANEL + v * VECTOR) * 4, HALF);
            }
            for (int r = 0; r < ROWS; r++) {
                const __m512 value = _mm512_set1_ps(x[r * stride + 2 * pair + HALF]);
                for (int v = 0; v < VECTORS; v++) acc[r][v] = _mm512_fmadd_ps(lanes[v], value, acc[r][v]);
            }
        }
    };

    int slice_inputs() const { return SLICE; }

    template <typename Body>
    void open(const PanelSlice& slice, int rows, Workspace& workspace, const Body& body) const {
        const DotRounding rounding;
        if (rows < MIN_WIDENED_ROWS) return body(View<false>{slice, nullptr});
        for (int pair = 0; pair < slice.inputs / 2; pair++)
            for (int half = 0; half < 2; half++)
                for (int v = 0; v < VECTORS; v++)
                    _mm512_store_ps(workspace.values + (2 * pair + half) * PANEL + v * VECTOR,
                        widen(slice.packed + (size_t(pair) * PANEL + v * VECTOR) * 4, half));
        body(View<true>{slice, workspace.values});
    }
};

}  // namespace baton

#endif
