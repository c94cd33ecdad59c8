// Reads rows of packed weights as floats: the inverse of gemm_pack.h, one output at a time. For the look-up of
// embeddings that share the weights of the output layer, and for the check of products at start.
#pragma once

#include "weight_format.h"

namespace baton {

// One output of a slice, at the slice's first byte.
struct UnpackedLane {
    const WeightFormat& format;
    const uint8_t* slice;
    int lane;
    int inputs;

    template <typename T>
    T number(const uint8_t* from, int64_t place) const {
        return number_at<T>(from + place * int64_t(sizeof(T)));
    }

    // Byte `byte` of word `word` of this output.
    uint8_t byte_of_word(const uint8_t* words, int word, int byte) const {
        return words[(int64_t(word) * PANEL + lane) * 4 + byte];
    }

    uint32_t code(int input) const {
        if (format.kind == WEIGHT_FLOAT8 || format.bits == 8) return byte_of_word(slice, input / 4, input % 4);
        const uint32_t low = byte_of_word(slice, input / 8, input % 4) >> (input / 4 % 2 * 4) & 15;
        const uint8_t* high = slice + 4 * low_words(format.bits, inputs);
        if (format.bits == 5) return low | (byte_of_word(high, input / 32, input % 4) >> (input / 4 % 8) & 1) << 4;
        if (format.bits == 6)
            return low | (byte_of_word(high, input / 16, input % 4) >> (input / 4 % 4 * 2) & 3) << 4;
        return low;
    }

    // The factor of an input. from: where the factors of the slice begin.
    float factor(const FactorFormat& of, const uint8_t* from, int input) const {
        const int64_t place = int64_t(input / std::min(of.super_size, CODED_SLICE)) * PANEL + lane;
        const float super = of.super_dtype == FLOAT16 ? to_float(Fp16{number<uint16_t>(from, place)})
                                                      : number<float>(from, place);
        if (of.codes == NO_CODES) return super;
        const uint8_t code = from[super_bytes(of, inputs) + int64_t(input / format.group_size) * PANEL + lane];
        return super * (of.codes == INT8_CODES ? float(int8_t(code)) : float(code));
    }

    const uint8_t* scales() const {
        const int bits = format.kind == CODED ? format.bits : 8;
        return slice + 4 * (low_words(bits, inputs) + high_words(bits, inputs));
    }

    // Rounds after each operation, as CodedWeight.dequantized does. The addition is in double, where the compiler
    // cannot join it with the product; its rounding to float is that of an addition in float.
    float coded_value(int input) const {
        const uint32_t own = code(input);
        const int number = int(format.has_table ? format.table[own] : own) - format.zero_point;
        const float scaled = float(number) * factor(format.scales, scales(), input);
        if (!format.offsets.super_size) return scaled;
        const uint8_t* offsets = scales() + factor_bytes(format.scales, inputs, format.group_size);
        return float(double(scaled) + double(factor(format.offsets, offsets, input)));
    }

    // to [inputs] = all values of this output.
    void write_to(float* to) const {
        const auto write = [&](const auto& value) {
            for (int input = 0; input < inputs; input++) to[input] = value(input);
        };
        const auto place = [&](int input) { return int64_t(input) * PANEL + lane; };
        switch (format.kind) {
            case WEIGHT_FLOAT32: return write([&](int input) { return number<float>(slice, place(input)); });
            case WEIGHT_FLOAT16:
                return write([&](int input) { return to_float(Fp16{number<uint16_t>(slice, place(input))}); });
            case WEIGHT_BFLOAT16:
                return write([&](int input) {
                    return to_float(Bf16{number<uint16_t>(slice, 2 * place(input / 2) + input % 2)});
                });
            case WEIGHT_FLOAT8:
                return write([&](int input) {
                    const float plain = to_float(Float8Bits{uint8_t(code(input))});
                    return format.scales.super_size ? plain * factor(format.scales, scales(), input) : plain;
                });
            default: return write([&](int input) { return coded_value(input); });
        }
    }
};

// to [k] = the weights of one output.
inline void unpack_row(const PackedWeights& weights, int64_t output, float* to) {
    const WeightFormat& format = weights.format;
    const uint8_t* slice = weights.panel_at(output / PANEL);
    for (int64_t input = 0; input < weights.k; input += slice_inputs(format)) {
        const int inputs = int(std::min<int64_t>(slice_inputs(format), weights.k - input));
        const UnpackedLane lane{format, slice, int(output % PANEL), inputs};
        const int64_t bytes = slice_bytes(format, inputs);
        // Each word is in a cache line of its own, and the hardware prefetches none at this distance.
        for (int64_t at = 4 * lane.lane; at < bytes; at += 4 * PANEL) __builtin_prefetch(slice + at);
        lane.write_to(to + input);
        slice += bytes;
    }
}

}  // namespace baton
