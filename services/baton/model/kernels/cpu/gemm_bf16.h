// Part of gemm.h: multiplies bfloat16 rows by bfloat16 weights with the dot product of pairs (AVX512-BF16). 24
// vectors of sums stay in registers.
#pragma once

#include "gemm.h"
#include "gemm_rows.h"

#ifdef BATON_HAS_BF16_DOT

namespace baton {

struct Bf16Dot {
    using Rows = Bf16Rows;
    struct Workspace {};

    explicit Bf16Dot(const WeightFormat&) {}

    static constexpr int VECTOR = 16, VECTORS = PANEL / VECTOR, PAIRS_PER_FETCH = 4;

    struct View {
        PanelSlice slice;

        static constexpr int ROWS_PER_TILE = 0;

        template <int ROWS>
        void multiply(const Bf16Rows& rows, int64_t row, float* sums, WeightPrefetch& prefetch) const {
            const Bf16* x = rows.values + row * rows.stride + slice.first_input;
            __m512 acc[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++)
                    acc[r][v] = slice.is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
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
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, acc[r][v]);
        }
    };

    int passes(int rows) const { return int(divide_up(rows, ROWS_PER_PASS)); }
    int fetches(int inputs) const { return int(divide_up(inputs / 2, PAIRS_PER_FETCH)); }

    template <typename Body>
    void open(const PanelSlice& slice, int, Workspace&, const Body& body) const {
        body(View{slice});
    }
};

}  // namespace baton

#endif
