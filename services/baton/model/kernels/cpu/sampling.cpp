// Finds the most likely token of each row of logits, among all tokens or among those of a mask.
//
// A mask is a row of packed bits, as in token_bits.py. Of equal logits the lowest id wins.
#include <algorithm>
#include <limits>

#include "parallel_for.h"
#include "simd.h"

namespace baton {
namespace {

constexpr int64_t WORD = 32;    // tokens of one word of a mask
constexpr int64_t BLOCK = 256;  // tokens whose maximum is compared at a time
constexpr int64_t MIN_PARALLEL_LOGITS = 65536;  // fewer are not worth waking the other threads; not tuned
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Best {
    float value = NOTHING;
    int64_t id = 0;
    bool has_nan = false;
};

inline bool has_bit(const uint32_t* bits, int64_t id) { return bits[id / WORD] >> (id % WORD) & 1; }

inline float largest(FloatVec values) {
    float lanes[VECTOR_FLOATS], found = NOTHING;
    store(lanes, values);
    for (float lane : lanes) found = lane > found ? lane : found;
    return found;
}

inline bool any(WordVec flags) {
    uint32_t lanes[VECTOR_FLOATS], found = 0;
    std::memcpy(lanes, &flags, sizeof flags);
    for (uint32_t lane : lanes) found |= lane;
    return found != 0;
}

// Gives the maximum of a full block. NaN is smaller than everything, and is noted without a mask.
template <bool MASKED>
float block_maximum(const float* logits, const uint32_t* bits, bool& has_nan) {
    FloatVec most = FloatVec{} + NOTHING;
    WordVec nan{}, lanes;
    for (int lane = 0; lane < VECTOR_FLOATS; lane++) lanes[lane] = uint32_t(lane);
    for (int64_t first = 0; first < BLOCK; first += WORD) {
        if (MASKED && !bits[first / WORD]) continue;
        for (int64_t i = 0; i < WORD; i += VECTOR_FLOATS) {
            auto values = load_vector<FloatVec>(logits + first + i);
            if constexpr (MASKED) {
                const WordVec is_allowed = ((WordVec{} + bits[first / WORD]) >> (lanes + uint32_t(i))) & 1;
                values = is_allowed != 0 ? values : FloatVec{} + NOTHING;
            } else {
                nan |= WordVec(values != values);
            }
            most = values > most ? values : most;
        }
    }
    if constexpr (!MASKED) has_nan |= any(nan);
    return largest(most);
}

template <bool MASKED>
Best best_of_row(const float* logits, const uint32_t* bits, int64_t vocab_size) {
    Best best;
    int64_t block = 0;
    for (; block + BLOCK <= vocab_size; block += BLOCK) {
        const auto* block_bits = MASKED ? bits + block / WORD : nullptr;
        const float most = block_maximum<MASKED>(logits + block, block_bits, best.has_nan);
        if (most > best.value) {
            best.value = most;
            best.id = block;  // of the token's block, for now
        }
    }
    const bool is_in_block = best.value > NOTHING;
    for (int64_t id = block; id < vocab_size; id++) {
        best.has_nan |= logits[id] != logits[id];
        if ((!MASKED || has_bit(bits, id)) && logits[id] > best.value) {
            best.value = logits[id];
            best.id = id;
        }
    }
    if (is_in_block && best.id < block)
        while (logits[best.id] != best.value || (MASKED && !has_bit(bits, best.id))) best.id++;
    return best;
}

}  // namespace
}  // namespace baton

extern "C" {

// logits: [rows, vocab_size], with this stride between rows.
// bits: [masks, (vocab_size + 31) / 32]; mask_of_row: the mask of each row, or -1.
// Sets for each row: ids; is_finite, whether the largest of all logits is finite and none is NaN; has_choice,
// whether an allowed logit is above -inf. The id of a row without one is 0.
void baton_best_tokens(const float* logits, int64_t row_stride, int64_t vocab_size, const uint32_t* bits,
    const int64_t* mask_of_row, int64_t rows, int64_t* ids, bool* is_finite, bool* has_choice, int32_t threads) {
    using namespace baton;
    const int64_t num_words = (vocab_size + WORD - 1) / WORD;
    run_team(rows * vocab_size > MIN_PARALLEL_LOGITS ? threads : 1, 1, [&](TeamThread& team) {
        team.parallel_for_batched(rows, [&](int64_t row) {
            const float* own = logits + row * row_stride;
            Best best = best_of_row<false>(own, nullptr, vocab_size);
            is_finite[row] = !best.has_nan && best.value > NOTHING && best.value < -NOTHING;
            const uint32_t* mask = mask_of_row[row] < 0 ? nullptr : bits + mask_of_row[row] * num_words;
            if (mask && !has_bit(mask, best.id)) best = best_of_row<true>(own, mask, vocab_size);
            ids[row] = best.id;
            has_choice[row] = best.value > NOTHING;
        });
    });
}
}
