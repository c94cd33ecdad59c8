// Integer products of 16 rows with a slice of bytes in the tile registers of AMX (AMX-INT8).
//
// A slice of bytes has the form of the second operand already: a row of a tile is a quad of inputs, 16 outputs
// wide. Sums are exact integers, so a row's result is the same as without tiles.
//
// Not run on a processor with AMX yet. Tests define BATON_EMULATE_TILES, which computes the same in plain C++.
#pragma once

#include "int_dot.h"
#include "weight_format.h"

#if defined(BATON_DPBUSD) && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__linux__)
#define BATON_TILES
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(BATON_DPBUSD) && defined(BATON_EMULATE_TILES)
#define BATON_TILES
#endif

namespace baton {

#if defined(BATON_TILES)
constexpr int TILE_ROWS = 16, TILE_INPUTS = 64;
#else
constexpr int TILE_ROWS = 0;
#endif

#if defined(BATON_TILES) && defined(BATON_EMULATE_TILES)

// Inputs of a product, its x, and its sums.
struct Tiles {
    int inputs;
    const int8_t* x;
    int64_t stride;
    int32_t sums[TILE_ROWS][PANEL];
};
inline thread_local Tiles tiles;

inline bool has_tiles() { return true; }
inline void open_tiles(int inputs) { tiles.inputs = inputs; }
inline void close_tiles() {}
inline void clear_sums() { std::memset(tiles.sums, 0, sizeof tiles.sums); }
inline void load_x(const int8_t* from, int64_t stride) {
    tiles.x = from;
    tiles.stride = stride;
}
inline void add_products(const uint32_t* quads) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(quads);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int i = 0; i < tiles.inputs; i++)
            for (int lane = 0; lane < PANEL; lane++)
                tiles.sums[r][lane] += tiles.x[r * tiles.stride + i] * bytes[(i / 4 * PANEL + lane) * 4 + i % 4];
}
inline void store_sums(int32_t* to) { std::memcpy(to, tiles.sums, sizeof tiles.sums); }

#elif defined(BATON_TILES)

// The compilers do not know that the instructions below read and write memory.
inline void order_memory() { __asm__ volatile("" ::: "memory"); }

// Linux lets a process use the tile registers after it has asked.
inline bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of 16 outputs each; 4: x; 5 to 7: weights. inputs: of a product, at most TILE_INPUTS.
inline void open_tiles(int inputs) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = uint16_t(tile == 4 ? inputs : 64);
        shapes.rows[tile] = uint8_t(tile < 5 ? TILE_ROWS : inputs / 4);
    }
    order_memory();
    _tile_loadconfig(&shapes);
}

inline void close_tiles() { _tile_release(); }

inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void load_x(const int8_t* from, int64_t stride) {
    order_memory();
    _tile_loadd(4, from, stride);
}

inline void add_products(const uint32_t* quads) {
    constexpr int64_t STRIDE = PANEL * 4;
    order_memory();
    _tile_loadd(5, quads, STRIDE);
    _tile_loadd(6, quads + 16, STRIDE);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(7, quads + 32, STRIDE);
    _tile_dpbsud(1, 4, 6);
    _tile_loadd(5, quads + 48, STRIDE);
    _tile_dpbsud(2, 4, 7);
    _tile_dpbsud(3, 4, 5);
}

inline void store_sums(int32_t* to) {
    constexpr int64_t STRIDE = PANEL * 4;
    _tile_stored(0, to, STRIDE);
    _tile_stored(1, to + 16, STRIDE);
    _tile_stored(2, to + 32, STRIDE);
    _tile_stored(3, to + 48, STRIDE);
    order_memory();
}

#endif

}  // namespace baton
