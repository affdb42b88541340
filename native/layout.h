// How a packed weight lies in memory: panels of 16 rows, each a few planes that vectors of any width read in order.
//
// A group is 32 columns of a panel. Its quad j holds columns 4j .. 4j + 3 of all 16 rows, 64 bytes: byte 4n + i is row n,
// column 4j + i, which is what a dot product of four bytes a lane (vpdpbusd, AMX int8) takes. Codes are cut into planes:
//   low, 4 bits  [groups][4][64]   vector v: low nibbles are quad v, high nibbles quad v + 4
//   low, 2 bits  [groups][2][64]   vector u: bits 2f, 2f + 1 are quad 2f + u
//   low, 8 bits  [groups][8][64]   quad j; signed values + 128
//   high, 1 bit  [groups][64]      bit j of a byte: the next bit of quad j
//   high, 2 bits [groups][2][64]   as low, 2 bits
//   sub          [groups][sub][16] bytes: scales of 32 or of twice 16 columns
//   half         [groups or super-blocks][half][16] float16: d, and m or dmin
// Plain numbers: F32 [cols][16]; F16, BF16 [cols / 2][16][2]; I8 as 8-bit codes, then 16 float32 scales. Columns of F16, BF16
// and I8 are padded to 32 with zeros, rows of all formats to 16.
#pragma once

#include <cstdint>

#include "abi.h"

namespace samovar {

constexpr int SUPER_BLOCK = 256;  // weights that share d in the K and IQ4_XS formats

struct Layout {
    int block;         // columns of a source block; 0: not a format of weights
    int block_bytes;   // bytes of a source block
    int low_bits;      // 0: plain numbers
    int high_bits;
    int sub;           // bytes a row and group
    int half;          // float16 numbers a row and `half_columns`
    int half_columns;
};

constexpr Layout layout_of(int format) {
    switch (format) {
        case SAMOVAR_F32: return {1, 4, 0, 0, 0, 0, 0};
        case SAMOVAR_F16:
        case SAMOVAR_BF16: return {1, 2, 0, 0, 0, 0, 0};
        case SAMOVAR_I8: return {1, 1, 8, 0, 0, 0, 0};
        case SAMOVAR_Q4_0:
        case SAMOVAR_IQ4_NL: return {32, 18, 4, 0, 0, 1, SAMOVAR_GROUP};
        case SAMOVAR_Q4_1: return {32, 20, 4, 0, 0, 2, SAMOVAR_GROUP};
        case SAMOVAR_Q5_0: return {32, 22, 4, 1, 0, 1, SAMOVAR_GROUP};
        case SAMOVAR_Q5_1: return {32, 24, 4, 1, 0, 2, SAMOVAR_GROUP};
        case SAMOVAR_Q8_0: return {32, 34, 8, 0, 0, 1, SAMOVAR_GROUP};
        case SAMOVAR_Q2_K: return {SUPER_BLOCK, 84, 2, 0, 2, 2, SUPER_BLOCK};
        case SAMOVAR_Q3_K: return {SUPER_BLOCK, 110, 2, 1, 2, 1, SUPER_BLOCK};
        case SAMOVAR_Q4_K: return {SUPER_BLOCK, 144, 4, 0, 2, 2, SUPER_BLOCK};
        case SAMOVAR_Q5_K: return {SUPER_BLOCK, 176, 4, 1, 2, 2, SUPER_BLOCK};
        case SAMOVAR_Q6_K: return {SUPER_BLOCK, 210, 4, 2, 2, 1, SUPER_BLOCK};
        case SAMOVAR_IQ4_XS: return {SUPER_BLOCK, 136, 4, 0, 1, 1, SUPER_BLOCK};
        default: return {};
    }
}

constexpr bool is_plain(int format) { return format == SAMOVAR_F32 || format == SAMOVAR_F16 || format == SAMOVAR_BF16; }

// Where the planes of a panel begin, in bytes from its start (`low` is at 0), and how long it is.
struct Planes {
    int64_t high, sub, half, bytes;
};

constexpr Planes planes_of(int format, int cols) {
    const Layout layout = layout_of(format);
    const int64_t groups = (int64_t(cols) + SAMOVAR_GROUP - 1) / SAMOVAR_GROUP;
    if (format == SAMOVAR_F32) return {0, 0, 0, int64_t(cols) * SAMOVAR_PANEL * 4};
    if (is_plain(format)) return {0, 0, 0, groups * SAMOVAR_GROUP * SAMOVAR_PANEL * 2};
    constexpr int64_t bit = SAMOVAR_GROUP * SAMOVAR_PANEL / 8;  // bytes of one bit of every code of a group
    const int64_t high = groups * layout.low_bits * bit;
    const int64_t sub = high + groups * layout.high_bits * bit;
    const int64_t half = sub + groups * layout.sub * SAMOVAR_PANEL;
    if (format == SAMOVAR_I8) return {high, sub, half, half + SAMOVAR_PANEL * 4};
    return {high, sub, half, half + cols / layout.half_columns * layout.half * SAMOVAR_PANEL * 2};
}

constexpr int num_panels(int rows) { return (rows + SAMOVAR_PANEL - 1) / SAMOVAR_PANEL; }

// What the four-bit places of IQ4_NL and IQ4_XS stand for.
constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

}  // namespace samovar
