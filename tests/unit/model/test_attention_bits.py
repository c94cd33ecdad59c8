"""Compares the bfloat16 attention of many rows in both products: dot products of pairs, and floats."""

from pathlib import Path

from tests.unit.model.native_libraries import bf16_program_status

BOTH_PRODUCTS = """
#include "attention_decode_bf16.h"
#ifdef BATON_HAS_BF16_DOT
using namespace baton;

uint64_t state = 1;
uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 32);
}

// Sizes around 1; whose products are subnormal; that are subnormal; all bits.
Bf16 number(int kind) {
    const uint32_t bits = next(), exponent = kind == 0 ? 118 + (bits >> 7 & 15)
        : kind == 1 ? 50 + (bits >> 7 & 31) : kind == 2 ? bits >> 7 & 3 : bits >> 7 & 255;
    return {uint16_t((bits & 0x807f) | exponent << 7)};
}

void set(Bf16& to, int kind) { to = number(kind); }
void set(int8_t& to, int) { to = int8_t(next()); }

bool is_same(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (bits_from_float(a[i]) != bits_from_float(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return false;
    return true;
}

template <typename S>
bool is_same_for(int dim, int rows, int begin, int end, int window, int query_kind, int key_kind, int value_kind) {
    constexpr int BLOCK = 16;
    const int blocks = (end + BLOCK - 1) / BLOCK;
    std::vector<S> keys(size_t(2) * blocks * BLOCK * dim);
    const size_t half = keys.size() / 2;
    // The same stride stands for blocks of KV and of scales.
    std::vector<Bf16> queries(size_t(rows) * dim), scales(keys.size());
    for (size_t i = 0; i < keys.size(); i++) set(keys[i], i < half ? key_kind : value_kind);
    for (Bf16& each : queries) each = number(query_kind);
    for (Bf16& each : scales) each = {uint16_t(number(0).bits & 0x7fff)};
    std::vector<int32_t> table(blocks);
    for (int i = 0; i < blocks; i++) table[i] = blocks - 1 - i;
    LayerKv layer{keys.data(), keys.data() + half, nullptr, nullptr};
    if (sizeof(S) == 1) layer.key_scales = scales.data(), layer.value_scales = scales.data() + half;
    std::vector<const Bf16*> pointers(rows);
    std::vector<KvRange> visible(rows);
    for (int r = 0; r < rows; r++) {
        pointers[r] = queries.data() + size_t(r) * dim;
        const int last = std::max(begin + 1, end - rows / 2 + r / 2);
        visible[r] = {window ? std::max(0, last - window) : 0, std::min(last, end)};
    }
    const KvRows<S> kv(layer, KvStrides{int64_t(BLOCK * dim * sizeof(S)), 0, 0}, 0, table.data(), BLOCK, dim,
        visible[0].begin);
    static PrefillAttentionBf16<PairProducts> by_pairs;
    static PrefillAttentionBf16<FloatProducts> by_floats;
    SoftmaxState pairs, floats;
    pairs.start(rows, dim);
    floats.start(rows, dim);
    const float factor = query_kind ? 1.0f : 0.1f;
    by_pairs.attend(pointers.data(), rows, visible.data(), kv, {begin, end}, end, factor, pairs);
    by_floats.attend(pointers.data(), rows, visible.data(), kv, {begin, end}, end, factor, floats);
    return is_same(pairs.row_max, floats.row_max) && is_same(pairs.row_sum, floats.row_sum)
        && is_same(pairs.weighted_values, floats.weighted_values);
}

int main() {
    int found = 0;
    for (int round = 0; round < 240; round++) {
        const int dim = 32 * (1 + next() % (round % 8 ? 4 : 9)), rows = 16 + next() % (round % 8 ? 60 : 400);
        const int begin = KV_BATCH * (next() % 2), end = begin + 1 + next() % (round % 8 ? 200 : 700);
        const int window = next() % 2 ? 1 + next() % 300 : 0;
        const bool is_extreme = round % 4 == 3;
        const int query = is_extreme ? next() % 3 : 0, key = is_extreme ? next() % 4 : 0;
        const int value = next() % (is_extreme ? 4 : 3);
        if (!is_same_for<Bf16>(dim, rows, begin, end, window, query, key, value)) found |= 1;
        if (!is_same_for<int8_t>(dim, rows, begin, end, window, query, 0, 0)) found |= 2;
    }
    return found && (__builtin_cpu_is("intel") || prefers_floats()) ? found : 0;
}
#else
int main() { return 9; }
#endif
"""


def test_attention_in_floats_has_the_bits_of_dot_products(tmp_path: Path) -> None:
    """Queries, keys and values are random, of all sizes, also subnormal and infinite, or in int8."""
    assert bf16_program_status(BOTH_PRODUCTS, tmp_path) == 0
