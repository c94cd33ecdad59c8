// A few rows times a stretch, for a processor that multiplies pairs of bfloat16 and adds them to floats: 24 sums in registers.
// A part of gemm.h.
#pragma once

namespace baton {

constexpr int STRETCH_PAIRS = 1024;
constexpr int VECTOR = 16;
constexpr int VECTORS = PANEL / VECTOR;

inline int passes_over(int rows) { return (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; }

inline void store(Bf16* to, __mmask16 lanes, __m512 values) { _mm256_mask_storeu_epi16(to, lanes, __m256i(_mm512_cvtneps_pbh(values))); }
inline void store(float* to, __mmask16 lanes, __m512 values) { _mm512_mask_storeu_ps(to, lanes, values); }

template <typename Out>
inline void write(const __m512* sums, int64_t row, const Columns<Out>& to) {
    for (int v = 0; v < VECTORS && v * VECTOR < to.columns; v++) {
        const int left = to.columns - v * VECTOR;
        const __mmask16 is_output = left >= VECTOR ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
        __m512 sum = sums[v];
        if (to.bias) {
            const __m256i halves = _mm256_maskz_loadu_epi16(is_output, to.bias + v * VECTOR);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
        }
        store(to.out + row * to.stride + v * VECTOR, is_output, sum);
    }
}

template <int ROWS, typename Out>
inline void multiply_rows(
    int row, const Bf16* x, int64_t x_stride, const Stretch& by, float* sums, const Columns<Out>& to, Ahead& ahead) {
    __m512 held[ROWS][VECTORS];
    sums += row * PANEL;
    x += row * x_stride;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) held[r][v] = by.is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
    for (int pair = 0; pair < by.pairs; pair++) {
        if (pair % AHEAD_PAIRS == 0) ahead.fetch();
        __m512bh lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++) lanes[v] = __m512bh(_mm512_loadu_si512(by.words + size_t(pair) * PANEL + v * VECTOR));
        for (int r = 0; r < ROWS; r++) {
            const __m512bh both = __m512bh(_mm512_set1_epi32(int(pair_at(x + r * x_stride + 2 * pair))));
            for (int v = 0; v < VECTORS; v++) held[r][v] = _mm512_dpbf16_ps(held[r][v], lanes[v], both);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        if (by.is_last) {
            write(held[r], row + r, to);
        } else {
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, held[r][v]);
        }
    }
}

}  // namespace baton
