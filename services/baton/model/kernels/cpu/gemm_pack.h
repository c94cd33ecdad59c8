// Packs weights into panels, see weight_format.h.
#pragma once

#include "weight_format.h"

namespace baton {

// values: [n, k] numbers, or codes of one byte. Factors: supers are float [n, k / super_size rounded up], codes
// one byte each [n, k / group_size], null without.
struct UnpackedWeights {
    const void* values;
    const float* scale_supers;
    const uint8_t* scale_codes;
    const float* offset_supers;
    const uint8_t* offset_codes;
};

// The part of a matrix [n, columns] that belongs to one panel. Outputs beyond n are zero.
template <typename T>
struct PanelSource {
    const T* values;
    int64_t columns;
    int64_t first;
    int64_t n;

    T at(int lane, int64_t column) const {
        const int64_t output = first + lane;
        return output < n && column < columns ? values[output * columns + column] : T{};
    }
};

// Writes inputs [from, from + inputs) of numbers, INPUTS to a word of each output.
template <typename Word, typename T>
uint8_t* pack_numbers(const PanelSource<T>& source, int64_t from, int inputs, uint8_t* to) {
    constexpr int INPUTS = int(sizeof(Word) / sizeof(T));
    for (int64_t input = from; input < from + inputs; input += INPUTS) {
        for (int lane = 0; lane < PANEL; lane++, to += sizeof(Word)) {
            for (int j = 0; j < INPUTS; j++) {
                const T value = input + j < from + inputs ? source.at(lane, input + j) : T{};
                std::memcpy(to + j * sizeof(T), &value, sizeof value);
            }
        }
    }
    return to;
}

// Sets the lowest `bits` bits of `value` at a byte of the word of each output.
inline void set_bits(uint32_t* words, int64_t word, int lane, int byte, int shift, uint32_t value) {
    words[word * PANEL + lane] |= value << (8 * byte + shift);
}

inline uint8_t* pack_codes(const PanelSource<uint8_t>& source, int bits, int64_t from, int inputs, uint8_t* to) {
    if (bits == 8) return pack_numbers<uint32_t>(source, from, inputs, to);
    auto* low = reinterpret_cast<uint32_t*>(to);
    uint32_t* high = low + low_words(bits, inputs);
    uint32_t* end = high + high_words(bits, inputs);
    std::fill(low, end, 0);
    for (int lane = 0; lane < PANEL; lane++) {
        for (int i = 0; i < inputs; i++) {
            const uint32_t code = source.at(lane, from + i);
            set_bits(low, i / 8, lane, i % 4, i / 4 % 2 * 4, code & 15);
            if (bits == 5) set_bits(high, i / 32, lane, i % 4, i / 4 % 8, code >> 4);
            if (bits == 6) set_bits(high, i / 16, lane, i % 4, i / 4 % 4 * 2, code >> 4);
        }
    }
    return reinterpret_cast<uint8_t*>(end);
}

inline uint8_t* pack_factors(const FactorFormat& format, const PanelSource<float>& supers,
    const PanelSource<uint8_t>& codes, int group_size, int64_t from, int inputs, uint8_t* to) {
    for (int super = 0; super < supers_in(format, inputs); super++) {
        const int64_t column = (from + super * std::min(format.super_size, CODED_SLICE)) / format.super_size;
        for (int lane = 0; lane < PANEL; lane++) {
            const float value = supers.at(lane, column);
            if (format.super_dtype == FLOAT16) {
                const auto half = from_float<Fp16>(value);
                std::memcpy(to, &half, sizeof half);
                to += sizeof half;
            } else {
                std::memcpy(to, &value, sizeof value);
                to += sizeof value;
            }
        }
    }
    if (format.codes == NO_CODES) return to;
    return pack_numbers<uint8_t>(codes, from / group_size, inputs / group_size, to);
}

inline void pack_panel(const PackedWeights& weights, const UnpackedWeights& from, int64_t panel, uint8_t* to) {
    const WeightFormat& format = weights.format;
    const int64_t n = weights.n, k = weights.k, first = panel * PANEL;
    const auto source = [&](auto one, const void* values, int64_t columns) {
        return PanelSource<decltype(one)>{static_cast<const decltype(one)*>(values), columns, first, n};
    };
    const auto factors = [&](const FactorFormat& of, const float* supers, const uint8_t* codes, int group_size,
        int64_t input, int inputs) {
        if (!of.super_size) return;
        to = pack_factors(of, source(float{}, supers, divide_up(k, of.super_size)),
            source(uint8_t{}, codes, k / group_size), group_size, input, inputs, to);
    };
    for (int64_t input = 0; input < k; input += slice_inputs(format)) {
        const int inputs = int(std::min<int64_t>(slice_inputs(format), k - input));
        switch (format.kind) {
            case WEIGHT_FLOAT32:
                to = pack_numbers<uint32_t>(source(float{}, from.values, k), input, inputs, to);
                break;
            case WEIGHT_FLOAT16:
                to = pack_numbers<uint16_t>(source(uint16_t{}, from.values, k), input, inputs, to);
                break;
            case WEIGHT_BFLOAT16:
                to = pack_numbers<uint32_t>(source(uint16_t{}, from.values, k), input, inputs, to);
                break;
            case WEIGHT_FLOAT8:
                to = pack_numbers<uint32_t>(source(uint8_t{}, from.values, k), input, inputs, to);
                factors(format.scales, from.scale_supers, nullptr, 1, input, inputs);
                break;
            default:
                to = pack_codes(source(uint8_t{}, from.values, k), format.bits, input, inputs, to);
                factors(format.scales, from.scale_supers, from.scale_codes, format.group_size, input, inputs);
                factors(format.offsets, from.offset_supers, from.offset_codes, format.group_size, input, inputs);
        }
    }
}

}  // namespace baton
