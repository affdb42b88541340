// Products of tiles on Intel AMX: two tiles of activations by two of weights, which keeps all eight tile registers at work.
//
// A tile is 16 rows of 64 bytes, 1 KB one behind the other: of activations 16 rows x 32 bfloat16 (or 64 int8) columns; of
// weights 16 pairs of columns x 16 outputs x 2 (or quads x 4), which is how panels lie in memory (layout.h). The compiler is
// not told what tile instructions read and write, hence the barriers.
#pragma once

#include "simd.h"

#if defined(__AMX_TILE__)

namespace samovar::SAMOVAR_ISA {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_BYTES = 1024;

#define SAMOVAR_MEMORY_BARRIER asm volatile("" ::: "memory")

// All eight tiles of this thread as 16 rows of 64 bytes.
inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    asm volatile("" ::"r"(&configuration) : "memory");
    _tile_loadconfig(&configuration);
}

#define SAMOVAR_TILE_PRODUCT(sum, a, b)               \
    do {                                              \
        if constexpr (IS_INT8) _tile_dpbsud(sum, a, b); \
        else _tile_dpbf16ps(sum, a, b);               \
    } while (false)

// c[row tile][panel] (16 x 16 each) = or += the product of `count` tiles of `ROW_TILES` x `PANELS` blocks. The second row
// tile's activations are `row_tile_bytes` behind. AHEAD: ask the memory for weights this many tiles ahead.
template <bool IS_INT8, int ROW_TILES, int PANELS, int AHEAD>
void multiply_tiles(const uint8_t* a, int64_t row_tile_bytes, const uint8_t* b0, const uint8_t* b1, int count, float* c,
                    bool is_first) {
    constexpr int SIZE = TILE_ROWS * LANES;
    SAMOVAR_MEMORY_BARRIER;
    if (is_first) {
        _tile_zero(0);
        if constexpr (PANELS == 2) _tile_zero(1);
        if constexpr (ROW_TILES == 2) _tile_zero(2);
        if constexpr (ROW_TILES == 2 && PANELS == 2) _tile_zero(3);
    } else {
        _tile_loadd(0, c, 64);
        if constexpr (PANELS == 2) _tile_loadd(1, c + SIZE, 64);
        if constexpr (ROW_TILES == 2) _tile_loadd(2, c + 2 * SIZE, 64);
        if constexpr (ROW_TILES == 2 && PANELS == 2) _tile_loadd(3, c + 3 * SIZE, 64);
    }
    const uint8_t* a1 = a + row_tile_bytes;
    for (int64_t at = 0; at < count * TILE_BYTES; at += TILE_BYTES) {
        if constexpr (AHEAD > 0)
            for (int64_t line = at + AHEAD * TILE_BYTES; line < at + (AHEAD + 1) * TILE_BYTES; line += 64) {
                __builtin_prefetch(b0 + line, 0, 3);
                if constexpr (PANELS == 2) __builtin_prefetch(b1 + line, 0, 3);
            }
        _tile_loadd(6, b0 + at, 64);
        _tile_loadd(4, a + at, 64);
        SAMOVAR_TILE_PRODUCT(0, 4, 6);
        if constexpr (PANELS == 2) {
            _tile_loadd(7, b1 + at, 64);
            SAMOVAR_TILE_PRODUCT(1, 4, 7);
        }
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(5, a1 + at, 64);
            SAMOVAR_TILE_PRODUCT(2, 5, 6);
            if constexpr (PANELS == 2) SAMOVAR_TILE_PRODUCT(3, 5, 7);
        }
    }
    _tile_stored(0, c, 64);
    if constexpr (PANELS == 2) _tile_stored(1, c + SIZE, 64);
    if constexpr (ROW_TILES == 2) _tile_stored(2, c + 2 * SIZE, 64);
    if constexpr (ROW_TILES == 2 && PANELS == 2) _tile_stored(3, c + 3 * SIZE, 64);
    SAMOVAR_MEMORY_BARRIER;
}

#undef SAMOVAR_TILE_PRODUCT

typedef void (*TileKernel)(const uint8_t* a, int64_t row_tile_bytes, const uint8_t* b0, const uint8_t* b1, int count, float* c,
                           bool is_first);

template <bool IS_INT8, int AHEAD>
SAMOVAR_INLINE TileKernel choose_tiles(int row_tiles, int panels) {
    if (row_tiles == 2)
        return panels == 2 ? multiply_tiles<IS_INT8, 2, 2, AHEAD> : multiply_tiles<IS_INT8, 2, 1, AHEAD>;
    return panels == 2 ? multiply_tiles<IS_INT8, 1, 2, AHEAD> : multiply_tiles<IS_INT8, 1, 1, AHEAD>;
}

}  // namespace samovar::SAMOVAR_ISA

#endif
