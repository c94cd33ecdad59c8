// Where the KV of one layer lies in memory, and how a row of it is stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace baton {

// Keys and values of a layer: of block 0, head 0. The scales are null unless KV is stored as int8; a number is
// then the integer times the scale of its token and head.
struct LayerKv {
    void* keys;
    void* values;
    Bf16* key_scales;
    Bf16* value_scales;

    bool is_quantized() const { return key_scales != nullptr; }
};

// Strides in bytes. Rows of a head are adjacent, as are their scales. All are multiples of the size of a number,
// because the layout aligns components.
struct KvStrides {
    int64_t block;
    int64_t head;
    int64_t scale_head;
};

template <typename T>
T* add_bytes(T* pointer, int64_t bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(pointer)) + bytes);
}

constexpr float INT8_LEVELS = 127.0f;

// Quantises a row to int8 and returns its scale. kv_quantization.py has the same operations in the same order:
// the largest magnitude / 127, rounded to bfloat16, then divisions that are rounded to nearest, ties to even.
// Magnitudes are compared as bits, in which NaN is above infinity, so that both reach the scale.
template <typename T>
Bf16 quantize_row(const T* row, int size, int8_t* out) {
    uint32_t largest = 0;
    for (int i = 0; i < size; i++) largest = std::max(largest, bits_from_float(to_float(row[i])) & 0x7fffffffu);
    const Bf16 scale = from_float<Bf16>(float_from_bits(largest) * (1.0f / INT8_LEVELS));
    const float rounded = to_float(scale), divisor = rounded == 0.0f ? 1.0f : rounded;
    for (int i = 0; i < size; i++) {
        float steps = to_float(row[i]) / divisor;
        steps = steps >= -INT8_LEVELS ? steps : -INT8_LEVELS;
        steps = steps <= INT8_LEVELS ? steps : INT8_LEVELS;
        out[i] = int8_t(bits_from_float(steps + ROUNDING_SHIFT) - bits_from_float(ROUNDING_SHIFT));
    }
    return scale;
}

}  // namespace baton
