// Part of gemm.h: multiplies rows by a slice with the bfloat16 dot product. 24 vectors of sums stay in
// registers.
#pragma once

namespace baton {

constexpr int SLICE_PAIRS = 1024;
constexpr int VECTOR = 16;
constexpr int VECTORS = PANEL / VECTOR;

inline int passes_over(int rows) { return (rows + ROWS_PER_PASS - 1) / ROWS_PER_PASS; }

inline void store(Bf16* output, __mmask16 lanes,
    __m512 values) { _mm256_mask_storeu_epi16(output, lanes, __m256i(_mm512_cvtneps_pbh(values))); }
inline void store(float* output, __mmask16 lanes, __m512 values) { _mm512_mask_storeu_ps(output, lanes, values); }

template <typename Out>
inline void write(const __m512* sums, int64_t row, const PanelOutput<Out>& output) {
    for (int v = 0; v < VECTORS && v * VECTOR < output.columns; v++) {
        const int left = output.columns - v * VECTOR;
        const __mmask16 is_output = left >= VECTOR ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
        __m512 sum = sums[v];
        if (output.bias) {
            const __m256i halves = _mm256_maskz_loadu_epi16(is_output, output.bias + v * VECTOR);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)));
        }
        store(output.out + row * output.stride + v * VECTOR, is_output, sum);
    }
}

template <int ROWS, typename Out>
inline void multiply_rows(
    int row, const Bf16* x, int64_t x_stride, const PanelSlice& slice, float* sums, const PanelOutput<Out>& output,
        WeightPrefetch& prefetch) {
    __m512 acc[ROWS][VECTORS];
    sums += row * PANEL;
    x += row * x_stride;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = slice.is_first ? _mm512_setzero_ps()
            : _mm512_load_ps(sums + r * PANEL + v * VECTOR);
    for (int pair = 0; pair < slice.pairs; pair++) {
        if (pair % PREFETCH_EVERY_PAIRS == 0) prefetch.fetch();
        __m512bh lanes[VECTORS];
        for (int v = 0; v < VECTORS; v++) lanes[v]
            = __m512bh(_mm512_loadu_si512(slice.packed + size_t(pair) * PANEL + v * VECTOR));
        for (int r = 0; r < ROWS; r++) {
            const __m512bh pair_value = __m512bh(_mm512_set1_epi32(int(load_bf16_pair(x + r * x_stride + 2 * pair))));
            for (int v = 0; v < VECTORS; v++) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], lanes[v], pair_value);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        if (slice.is_last) {
            write(acc[r], row + r, output);
        } else {
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * VECTOR, acc[r][v]);
        }
    }
}

}  // namespace baton
